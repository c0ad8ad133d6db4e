"""Images in Parquet files, as the hub writes them, and errors that name file and column."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fedvit.errors import ConfigError, DataError
from fleet.datasets import read_samples
from fleet.datasets.cifar100 import FINE
from fleet.datasets.parquet import is_parquet, read_parquet
from tests.support.codes import has_code
from tests.support.pictures import png


def hub(value: int) -> dict[str, Any]:
    """An image as the hub's library writes it."""
    return {"bytes": png(value), "path": f"{value}.png"}


def write(path: Path, columns: dict[str, Any], names: dict[str, list[str]] | None = None) -> Path:
    """`names` of a column's numbers are noted as the hub's library does."""
    table = pyarrow.table(columns)
    if names:
        features = {column: {"names": given, "_type": "ClassLabel"} for column, given in names.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path)
    return path


def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """Test and train files, in the order of their names; "bird" occurs nowhere and is a class all the same."""
    names = {"label": ["bird", "cat", "dog"]}
    write(tmp_path / "data/train-00000-of-00001.parquet", {"img": [hub(1), hub(2)], "label": [1, 2]}, names)
    write(tmp_path / "data/test-00000-of-00001.parquet", {"img": [hub(3)], "label": [2]}, names)
    samples = read_parquet(tmp_path, 4)
    assert samples.classes == ("bird", "cat", "dog")
    assert samples.labels.tolist() == [2, 1, 2]
    images = samples.images[np.array([0, 1])]
    assert images.shape == (2, 4, 4, 3)
    assert images[:, 0, 0, 0].tolist() == [3, 1]
    assert samples.coarse_labels is None
    assert samples.domains is None


def test_plain_bytes_and_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2), png(3)], "label": [10, 2, 10]})
    samples = read_parquet(path, 4)
    assert samples.classes == ("02", "10")
    assert samples.labels.tolist() == [1, 0, 1]


def test_texts_are_sorted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "label": ["dog", "cat"]})
    samples = read_parquet(path, 4)
    assert samples.classes == ("cat", "dog")
    assert samples.labels.tolist() == [1, 0]


def test_names_that_would_lead_out_of_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1), png(2)], "label": [0, 1]}, {"label": ["../up", "a/b"]})
    assert read_parquet(path, 4).classes == ("_..-up", "a-b")


def test_coarse_labels(tmp_path: Path) -> None:
    columns = {"img": [hub(1), hub(2)], "fine_label": [0, 1], "coarse_label": [7, 3]}
    samples = read_parquet(write(tmp_path / "x.parquet", columns), 4)
    assert samples.coarse_labels is not None
    assert samples.coarse_labels.tolist() == [1, 0]


def test_coarse_labels_of_cifar_100_by_its_names(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"img": [hub(1)], "label": [19]}, {"label": list(FINE)})
    samples = read_parquet(path, 4)
    assert samples.coarse_labels is not None
    assert samples.coarse_labels.tolist() == [11]  # cattle: large omnivores and herbivores


@pytest.mark.parametrize(
    ("domains", "names"), [(["photo", "art", "photo"], None), ([1, 0, 1], {"domain": ["art", "photo"]})]
)
def test_domains(tmp_path: Path, domains: list[Any], names: dict[str, list[str]] | None) -> None:
    columns = {"image": [hub(value) for value in range(3)], "label": [0, 1, 0], "domain": domains}
    samples = read_parquet(write(tmp_path / "x.parquet", columns, names), 4)
    assert samples.domains is not None
    assert samples.domains.tolist() == [1, 0, 1]
    assert samples.domain_names == ("art", "photo")


def test_rows_without_image_or_label_are_left_out(tmp_path: Path) -> None:
    """Row 0 is good; 1 has no image, 2 and 3 no label."""
    images = [png(1), b"no image", png(2), png(3)]
    samples = read_parquet(write(tmp_path / "x.parquet", {"image": images, "label": [0, 0, None, -1]}), 4)
    assert len(samples) == 1
    assert len(samples.unreadable) == 3
    assert any("x.parquet, row 1: not a PNG" in line for line in samples.unreadable)
    assert [line for line in samples.unreadable if line.startswith("no label")][1].endswith("x.parquet, row 3")


def test_no_readable_image(tmp_path: Path) -> None:
    """Bytes of no image, and an image that is elsewhere."""
    columns = {"image": [{"bytes": None, "path": "a.png"}, {"bytes": b"x", "path": "b.png"}], "label": [0, 1]}
    with pytest.raises(DataError, check=has_code("FV2008", "x.parquet")):
        read_parquet(write(tmp_path / "x.parquet", columns), 4)


def test_it_is_recognised(tmp_path: Path) -> None:
    assert not is_parquet(tmp_path)
    write(tmp_path / "a/x.parquet", {"image": [png(1)], "label": [0]})
    assert len(read_samples(str(tmp_path), 4)) == 1
    assert len(read_samples(str(tmp_path / "a/x.parquet"), 4)) == 1


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"picture": [b"x"], "label": [0]}, "picture"),
        ({"image": [b"x"]}, "label"),
        ({"image": ["x"], "label": [0]}, "image"),
        ({"image": [{"path": "x"}], "label": [0]}, "bytes"),
        ({"image": [png(1)], "label": [0.5]}, "float"),
    ],
)
def test_error_names_file_and_column(tmp_path: Path, columns: dict[str, Any], name: str) -> None:
    with pytest.raises(DataError, check=has_code("FV2011", name)):
        read_parquet(write(tmp_path / "x.parquet", columns), 4)


def test_a_label_without_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1)], "label": [2]}, {"label": ["cat", "dog"]})
    with pytest.raises(DataError, check=has_code("FV2008")):
        read_parquet(path, 4)


@pytest.mark.parametrize("content", [b"", b"no table", b"PAR1 cut short PAR1"])
def test_damaged_and_missing_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, check=has_code("FV2011", tmp_path.name)):
        read_parquet(tmp_path)
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, check=has_code("FV2011", "x.parquet")):
        read_parquet(tmp_path / "x.parquet")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", {"image": [png(1)], "label": [0]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, check=has_code("FV2011")):
        read_parquet(path, 4)
