from pathlib import Path

import pytest

from fedvit.errors import StorageFailed
from profiles.probes.disk import measure_disk


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    """The folder is made where it is not there; 3 MiB are what was asked for."""
    speed = measure_disk(tmp_path / "state", 3 * 2**20)
    assert speed.size_bytes == 3 * 2**20
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert list((tmp_path / "state").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed):
        measure_disk(tmp_path / "file", 3 * 2**20)
