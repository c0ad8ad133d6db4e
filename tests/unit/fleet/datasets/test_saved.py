"""Folders of `save_to_disk`; the one in `saved` was written by the library itself, version 5.2.0."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedvit.errors import ConfigError, DataError
from fleet.datasets import read_samples
from fleet.datasets.columns import Columns, make_columns
from fleet.datasets.saved import is_saved, read_saved
from tests.support.codes import has_code

SAVED = Path(__file__).parent / "saved"
"""Six images of 0, 20, ... 100: four of the split train and two of test, with `labels` cat and dog, and `site`."""


def test_what_the_library_wrote() -> None:
    """The columns `picture` and `labels` are found by the kinds that the library notes."""
    samples = read_samples(str(SAVED), 4)
    assert samples.classes == ("cat", "dog")
    order = samples.images[np.arange(6)][:, 0, 0, 0] // 20
    assert order.tolist() == [4, 5, 0, 1, 2, 3]  # the split test comes first
    assert samples.labels.tolist() == (order % 2).tolist()
    assert samples.official_test is not None
    assert samples.official_test.tolist() == [True, True, False, False, False, False]
    assert samples.domains is None


def test_columns_by_name() -> None:
    samples = read_samples(str(SAVED), 4, Columns(label="site", domain="labels"))
    assert samples.classes == ("a", "b")
    assert samples.domain_names == ("cat", "dog")


def test_one_split(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "train", tmp_path / "mine")
    samples = read_saved(tmp_path / "mine", 4)
    assert len(samples) == 4
    assert samples.official_test is None
    assert not is_saved(tmp_path / "mine" / "state.json")


def test_unknown_columns_are_named() -> None:
    with pytest.raises(DataError, check=has_code("FV2011", "'sight'")):
        read_samples(str(SAVED), 4, Columns(domain="sight"))
    with pytest.raises(ConfigError, check=has_code("FV2011", "'domian'")):
        make_columns({"domian": "site"})
    with pytest.raises(ConfigError, check=has_code("FV2011", "digits")):
        read_samples("digits", 4, Columns(label="site"))


@pytest.mark.parametrize("cut", [0, 8, 200, 900])
def test_damaged_files(tmp_path: Path, cut: int) -> None:
    shutil.copytree(SAVED / "train", tmp_path / "mine")
    [file] = (tmp_path / "mine").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, check=has_code("FV2008", file.name)):
        read_saved(tmp_path / "mine", 4)


def test_changed_bytes_are_refused_or_read(tmp_path: Path) -> None:
    """Read or refuse a file with one byte set to 0xff: no other error may leave the reader."""
    shutil.copytree(SAVED / "test", tmp_path / "mine")
    [file] = (tmp_path / "mine").glob("*.arrow")
    content = file.read_bytes()
    refused = 0
    for place in range(len(content)):
        file.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        try:
            read_saved(tmp_path / "mine", 4)
        except DataError:
            refused += 1
    assert 0 < refused < len(content)
