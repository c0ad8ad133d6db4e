"""Folders that PFLlib dealt out: pickled dictionaries in .npz files, of which no code may run."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.pfllib import is_pfllib, read_pfllib
from tests.support.codes import has_code


def save(file: Path, data: Any) -> None:
    """Write a file as PFLlib's `save_file` does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as content:
        np.savez_compressed(content, data=data)


def client(labels: list[int]) -> dict[str, Any]:
    """Images of three colours, as torchvision's normalisation by 0.5 leaves them: black is -1, white 1."""
    levels = np.array(labels, dtype=np.float32).reshape(-1, 1, 1, 1) * 51 / 127.5 - 1
    return {"x": np.broadcast_to(levels, (len(labels), 3, 8, 8)).copy(), "y": np.array(labels)}


def write(folder: Path) -> Path:
    """Eleven clients, so that 10 comes after 9; each has its own number of images."""
    for number in range(11):
        save(folder / "train" / f"{number}.npz", client([0, number % 5] * (number + 1)))
        save(folder / "test" / f"{number}.npz", client([number % 5] * (number + 2)))
    (folder / "config.json").write_text("{}")
    return folder


def test_clients_are_domains_with_their_own_test_images(tmp_path: Path) -> None:
    samples = read_samples(str(write(tmp_path / "Cifar10")), 8)
    assert samples.dataset == "Cifar10"
    assert samples.classes == ("0", "1", "2", "3", "4")
    assert samples.domain_names == tuple(map(str, range(11)))
    assert samples.official_test is not None
    assert samples.domains is not None
    for number in range(11):
        mine = samples.domains == number
        assert (mine & ~samples.official_test).sum() == 2 * (number + 1)
        assert samples.labels[mine & samples.official_test].tolist() == [number % 5] * (number + 2)
    pixels = samples.images[np.arange(len(samples))]
    assert (pixels == samples.labels.reshape(-1, 1, 1, 1) * 51).all()


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.zeros((2, 3, 8, 8))}, {"x": [1], "y": np.zeros(1, int)}, {"x": np.zeros((2, 8, 8)), "y": np.zeros(2)},
        {"x": np.array(1), "y": np.zeros(1, int)},
    ],
)  # fmt: skip
def test_wrong_content_names_the_file(tmp_path: Path, data: Any) -> None:
    save(tmp_path / "train" / "0.npz", data)
    with pytest.raises(DataError, check=has_code("FV2010", "0.npz")):
        read_pfllib(tmp_path, 8)


def test_an_array_without_a_suffix_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with zipfile.ZipFile(tmp_path / "train" / "0.npz", "w") as archive:
        archive.writestr("data", b"")
    with pytest.raises(DataError, check=has_code("FV2010", "0.npz")):
        read_pfllib(tmp_path, 8)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("data", [Attack(), {"x": Attack(), "y": 0}, {"x": np.array([Attack()], object), "y": 0}])
def test_no_code_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "train" / "0.npz", data)
    with pytest.raises(DataError, check=has_code("FV2009", "mkdir")):
        read_pfllib(tmp_path, 8)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("data", "code"), [(np.zeros(3), "FV2009"), (np.array([{}, {}]), "FV2009"), ([1, 2], "FV2009"), (None, "FV2009")]
)
def test_other_arrays_are_refused(tmp_path: Path, data: Any, code: str) -> None:
    save(tmp_path / "train" / "0.npz", data)
    with pytest.raises(DataError, check=has_code(code, "0.npz")):
        read_pfllib(tmp_path, 8)


def test_damaged_files(tmp_path: Path) -> None:
    save(tmp_path / "train" / "0.npz", client([0]))
    file = tmp_path / "train" / "0.npz"
    content = file.read_bytes()
    for cut in (0, 40, len(content) // 2):
        file.write_bytes(content[:cut])
        with pytest.raises(DataError, check=has_code("FV2010", "0.npz")):
            read_pfllib(tmp_path, 8)
    file.write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(DataError, check=has_code("FV2010", "0.npz")):
        read_pfllib(tmp_path, 8)
    assert not is_pfllib(tmp_path / "train")
