"""The folder of features stays within its room."""

import os
from pathlib import Path

import pytest

from edge_client.storage.feature_file import count_record_bytes
from edge_client.storage.features import FeatureFolder

SIZE = count_record_bytes(10, sealed=False)


def test_a_file_is_found_again_and_is_private(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path / "features")
    file = folder.find_file("a" * 64, 10, 5, None)
    assert file
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.find_file("a" * 64, 10, 7, None) == file
    assert folder.find_file("a" * 64, 11, 5, None) != file, "records of another size have another file"


@pytest.mark.parametrize(("room", "fits"), [(5 * SIZE, True), (5 * SIZE - 1, False), (None, True), (0, False)])
def test_features_that_have_no_room_are_not_kept(room: int | None, fits: bool, tmp_path: Path) -> None:
    file = FeatureFolder(tmp_path / "features").find_file("a" * 64, 10, 5, room)
    assert (file is not None) == fits == (tmp_path / "features").exists()


def test_the_oldest_files_leave(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path)
    files = []
    for number, digest in enumerate("abc"):
        file = folder.find_file(digest * 64, 10, 5, None)
        assert file
        os.utime(file, (number, number))
        files.append(file)
    assert [file.exists() for file in files] == [False, True, True]
    assert folder.find_file("b" * 64, 10, 5, None) == files[1], "the file in use is not removed"
    assert folder.find_file("d" * 64, 10, 5, None)
    assert [file.exists() for file in files] == [False, True, False], "b was used after c"


def test_older_files_leave_the_room_to_the_newest(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path)
    first = folder.find_file("a" * 64, 10, 5, None)
    assert first
    first.write_bytes(bytes(3 * SIZE))
    assert folder.find_file("b" * 64, 10, 5, 8 * SIZE)
    assert first.exists()
    assert folder.find_file("c" * 64, 10, 5, 7 * SIZE)
    assert not first.exists()


def test_all_files_can_be_removed(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path)
    file = folder.find_file("a" * 64, 10, 5, None)
    assert file
    file.write_bytes(bytes(100))
    assert folder.remove_all() >= 100
    assert not file.exists()
    assert folder.remove_all() == 0


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "features").write_text("a file")
    assert FeatureFolder(tmp_path / "features").find_file("a" * 64, 10, 5, None) is None
