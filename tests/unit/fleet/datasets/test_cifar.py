"""The real formats, in small: pickles as Python 2 wrote them, and the records for C programs."""

import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.cifar import is_cifar, read_cifar
from fleet.datasets.cifar100 import COARSE, FINE, coarse_labels
from tests.support.codes import has_code

FILES_10 = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
FILES_100 = ["train", "test"]

Write = Callable[[Path, str, np.ndarray, list[list[int]]], None]
"""Write one file of a folder: its pixels (n, 3072), its labels (coarse and) fine."""


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Texts and bytes as Python 2's `str`, numpy's modules by their old names, protocol 2."""

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch}  # type: ignore[attr-defined]

    def save_bytes(self, value: bytes | str) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    def save_global(self, value: Any, name: str | None = None) -> None:
        module, name = value.__module__.replace("numpy._core", "numpy.core"), name or value.__qualname__
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = save_bytes
    dispatch[type] = dispatch[type(len)] = dispatch[type(save_bytes)] = save_global


def python2(content: object) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def write_pickled(folder: Path, name: str, pixels: np.ndarray, labels: list[list[int]]) -> None:
    keys = ["labels"] if len(labels) == 1 else ["coarse_labels", "fine_labels"]
    batch = {"batch_label": name, "data": pixels, **dict(zip(keys, labels, strict=True))}
    (folder / name).write_bytes(python2(batch))


def write_binary(folder: Path, name: str, pixels: np.ndarray, labels: list[list[int]]) -> None:
    columns = np.array(labels, dtype=np.uint8).reshape(len(labels), -1).T
    (folder / f"{name}.bin").write_bytes(np.concatenate([columns, pixels], axis=1).tobytes())


@pytest.fixture(params=[write_pickled, write_binary])
def write(request: pytest.FixtureRequest) -> Write:
    return cast(Write, request.param)


def image(number: int) -> np.ndarray:
    """3072 values by colour, row, column: red is the number, green the row, blue the column."""
    rows, columns = np.mgrid[:32, :32]
    return np.stack([np.full((32, 32), number), rows, columns]).astype(np.uint8).reshape(-1)


def write_10(folder: Path, write: Write) -> Path:
    """Two images a file, twelve in all; image i has label i mod 10."""
    for place, name in enumerate(FILES_10):
        numbers = [2 * place, 2 * place + 1]
        write(folder, name, np.stack([image(number) for number in numbers]), [[number % 10 for number in numbers]])
    return folder


def test_cifar_10(tmp_path: Path, write: Write) -> None:
    samples = read_cifar(write_10(tmp_path, write), 32)
    assert samples.classes[:3] == ("airplane", "automobile", "bird")
    assert list(samples.classes) == sorted(samples.classes)
    np.testing.assert_array_equal(samples.labels, np.arange(12) % 10)
    images = samples.images[np.array([11, 3])]
    assert images.shape == (2, 32, 32, 3)
    assert images.dtype == np.uint8
    assert (images[0, :, :, 0] == 11).all()
    assert images[1, 5, 9].tolist() == [3, 5, 9]
    assert samples.coarse_labels is None


def test_cifar_100_has_coarse_labels(tmp_path: Path, write: Write) -> None:
    """Fine label 0 is the apple, of coarse label 4, fruit and vegetables; 19 is cattle, 11, large omnivores."""
    write(tmp_path, "train", np.stack([image(0), image(1)]), [[4, 11], [0, 19]])
    write(tmp_path, "test", np.stack([image(2)]), [[4], [0]])
    samples = read_cifar(tmp_path, 32)
    assert samples.labels.tolist() == [0, 19, 0]
    assert [samples.classes[label] for label in samples.labels[:2]] == ["apple", "cattle"]
    assert samples.coarse_labels is not None
    assert samples.coarse_labels.tolist() == [4, 11, 4]
    table = coarse_labels(samples.classes, samples.labels)
    assert table is not None
    assert table.tolist() == [4, 11, 4]


def test_labels_in_an_array(tmp_path: Path) -> None:
    write_10(tmp_path, write_pickled)
    batch = {"data": np.stack([image(0)]), "labels": np.array([3], dtype=np.int32)}
    (tmp_path / "test_batch").write_bytes(python2(batch))
    assert read_cifar(tmp_path).labels[-1] == 3


def test_it_is_recognised(tmp_path: Path, write: Write) -> None:
    assert not is_cifar(tmp_path)
    assert not is_cifar(tmp_path / "gone")
    assert len(read_samples(str(write_10(tmp_path, write)), 32)) == 12


def test_class_folders_named_train_and_test_are_no_batches(tmp_path: Path) -> None:
    for name in FILES_100:
        (tmp_path / name).mkdir()
    assert not is_cifar(tmp_path)


def test_error_names_the_file(tmp_path: Path, write: Write) -> None:
    """A label out of range, a missing file, and no file at all."""
    write_10(tmp_path, write)
    write(tmp_path, "data_batch_2", np.stack([image(0)]), [[12]])
    with pytest.raises(DataError, check=has_code("FV2008")):
        read_cifar(tmp_path)
    for path in tmp_path.glob("data_batch_4*"):
        path.unlink()
    with pytest.raises(DataError, check=has_code("FV2008", "data_batch_4")):
        read_cifar(tmp_path)
    with pytest.raises(DataError, check=has_code("FV2008", "gone")):
        read_cifar(tmp_path / "gone")


def test_a_file_cut_short(tmp_path: Path) -> None:
    write_10(tmp_path, write_binary)
    (tmp_path / "test_batch.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, check=has_code("FV2008", "test_batch.bin")):
        read_cifar(tmp_path)


PIXELS = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ({"labels": [0]}, "data"),
        ({"data": PIXELS}, "labels"),
        ({"data": [0], "labels": [0]}, "data"),
        ({"data": np.zeros((1, 9), np.uint8), "labels": [0]}, "data"),
        ({"data": np.zeros((1, 3072), np.float32), "labels": [0]}, "data"),
        ({"data": PIXELS, "labels": [0.5]}, "labels"),
        ({"data": PIXELS, "labels": [[0], [0, 1]]}, "labels"),
        ({"data": PIXELS, "labels": np.zeros(1)}, "labels"),
        ({"data": PIXELS, "labels": [0, 1]}, "labels"),
        ({"data": PIXELS, "labels": 3}, "labels"),
    ],
)
def test_error_names_the_key_of_a_batch(tmp_path: Path, batch: dict[str, object], key: str) -> None:
    write_10(tmp_path, write_pickled)
    (tmp_path / "data_batch_1").write_bytes(python2(batch))
    with pytest.raises(DataError, check=has_code("FV2008", key)):
        read_cifar(tmp_path)


def test_the_table_of_coarse_labels() -> None:
    """20 groups of 5, 100 names in all, in the order of the data set's label numbers, which is the alphabet's."""
    assert len(COARSE) == 20
    assert {len(names) for names in COARSE.values()} == {5}
    assert len(set(FINE)) == 100
    assert list(COARSE) == sorted(COARSE)
    assert (FINE[0], FINE[26], FINE[99]) == ("apple", "crab", "worm")
    assert coarse_labels(("cat", "dog"), np.array([0, 1])) is None
