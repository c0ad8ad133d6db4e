"""LEAF's JSON of images, beside its JSON of texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets import read_dataset
from fleet.datasets.leafimages import is_leafimages, read_leafimages
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from tests.support.codes import has_code


def write(file: Path, writers: dict[str, tuple[list[Any], list[Any]]]) -> Path:
    """In the order of LEAF's own files: users, numbers of samples, data."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": [*writers],
        "num_samples": [len(x) for x, _ in writers.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in writers.items()},
    }
    file.write_text(json.dumps(content))
    return file


def flat(level: float, numbers: int = 784) -> list[float]:
    return [level] * numbers


def test_writers_are_domains(tmp_path: Path) -> None:
    write(tmp_path / "train/a.json", {"f1": ([flat(1.0), flat(0.2)], [61, 3]), "f0": ([flat(0)], [3])})
    write(tmp_path / "train/b.json", {"f2": ([flat(0.6)], [7]), "empty": ([], [])})
    write(tmp_path / "test/a.json", {"f1": ([flat(0.4)], [61])})
    samples = read_dataset(str(tmp_path), 28)
    assert isinstance(samples, Samples)
    assert samples.classes == ("03", "07", "61")
    assert samples.labels.tolist() == [2, 0, 0, 1, 2]
    assert samples.domain_names == ("f0", "f1", "f2")
    assert samples.domains is not None
    assert samples.domains.tolist() == [1, 1, 0, 2, 1]
    assert samples.official_test is not None
    assert samples.official_test.tolist() == [False] * 4 + [True]
    assert samples.images[np.arange(5)][:, 5, 5, 0].tolist() == [255, 51, 0, 153, 102]


def test_colours_and_a_single_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"u": ([[0.0, 1.0, 0.2] * 16], [0])})
    assert read_leafimages(file, 4).images[np.array([0])][0, 2, 2].tolist() == [0, 255, 51]


def test_texts_stay_texts(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"u": (["to be"], ["."])})
    assert not is_leafimages(file)
    assert isinstance(read_dataset(str(file), None), Texts)


@pytest.mark.parametrize(
    ("writers", "name"),
    [
        ({"u": ([flat(0.1), flat(0.1, 783)], [0, 1])}, "'u'"),
        ({"u": ([flat(0.1, 782)], [0])}, "782"),
        ({"u": ([flat(0.1)], [0, 1])}, "'u'"),
        ({"u": ([flat(0.1)], [0.5])}, "a.json"),
        ({"u": ([["x"]], [0])}, "a.json"),
        ({"u": ([flat(400.0)], [0])}, "400"),
    ],
)
def test_error_names_file_and_user(tmp_path: Path, writers: dict[str, tuple[list[Any], list[Any]]], name: str) -> None:
    with pytest.raises(DataError) as refused:
        read_leafimages(write(tmp_path / "a.json", writers), 28)
    assert refused.value.code in ("FV2005", "FV2010")
    assert name in str(refused.value)


def test_a_user_without_data(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", {"u": ([flat(0.1)], [0])})
    file.write_text(file.read_text().replace('["u"]', '["u", "v"]'))
    with pytest.raises(DataError, check=has_code("FV2005", "'v'")):
        read_leafimages(file, 28)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(DataError, check=has_code("FV2005", "a.json")):
        read_leafimages(file, 28)
