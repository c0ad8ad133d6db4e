"""Laws of readers hold for fedvit's own, and refuse readers that break them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fleet.datasets
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.readers import (
    LAWS,
    give_images_with_labels,
    give_the_rows_asked_for,
    recognise_its_own,
    refuse_damaged_files,
)
from fleet.datasets import READERS, DatasetReader
from fleet.datasets.samples import Samples

RNG = np.random.default_rng(0)


def write_npz(folder: Path) -> Path:
    np.savez(folder / "set.npz", x=RNG.integers(0, 256, (9, 6, 6), dtype=np.uint8), y=np.arange(9) % 3)
    return folder / "set.npz"


def write_folder(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / "set" / name).mkdir(parents=True)
        for number in range(3):
            pixels = RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "set" / name / f"{number}.png")
    return folder / "set"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("name", "write"), [("npz", write_npz), ("imagefolder", write_folder)])
def test_fedvits_own_readers_obey_the_laws(
    law: Law, name: str, write: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, name, READERS[name]._replace(write_example=write))
    assert find_break(law, name) is None


def read(path: Path, size: int) -> Samples:
    count = len(path.read_bytes())
    return Samples(
        dataset="bytes",
        size=size,
        images=np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8),
        labels=np.arange(count, dtype=np.int64) % 2,
        classes=("a", "b"),
    )


def write_bytes(folder: Path) -> Path:
    (folder / "x.bytes").write_bytes(bytes(6))
    return folder / "x.bytes"


def is_bytes(path: Path) -> bool:
    return path.suffix == ".bytes"


SOUND = DatasetReader(is_bytes, read, write_example=write_bytes)


@pytest.mark.parametrize("law", LAWS)
def test_a_sound_reader_breaks_no_law(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fleet.datasets.READERS, "bytes", SOUND)
    assert find_break(law, "bytes") is None


def read_again(path: Path, size: int) -> Samples:
    samples = read(path, size)
    shape = samples.images[np.arange(len(samples))].shape
    return Samples(
        dataset="bytes",
        size=size,
        images=np.random.default_rng().integers(0, 256, shape, dtype=np.uint8),
        labels=samples.labels,
        classes=samples.classes,
    )


def read_half(path: Path, size: int) -> Samples:
    if len(path.read_bytes()) < 6:
        raise ValueError("cut")
    return read(path, size)


@pytest.mark.parametrize(
    ("change", "law", "reason"),
    [
        ({"recognises": Path.exists}, recognise_its_own, "it recognises folder, too"),
        ({"recognises": Path.is_dir}, recognise_its_own, "it does not recognise x.bytes"),
        ({"write_example": write_npz}, recognise_its_own, "it does not recognise set.npz"),
        ({"write_example": None}, give_images_with_labels, "it has no `write_example`"),
        ({"read": lambda path, size: read(path, 5)}, give_images_with_labels, "6 samples of size 5"),
        ({"read": lambda path, size: (read(path, size),)}, give_images_with_labels, "it returns a tuple, no Samples"),
        ({"read": read_again}, give_the_rows_asked_for, "read again, images differ"),
        ({"read": read_half}, refuse_damaged_files, "x.bytes cut in half: ValueError: cut"),
    ],
)
def test_a_broken_reader_is_found(
    change: dict[str, object], law: Law, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fleet.datasets.READERS, "bytes", SOUND._replace(**change))  # type: ignore[arg-type]
    found = find_break(law, "bytes")
    assert found is not None
    assert reason in found
