"""Pictures of folders: each new one once, when it is whole."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from edge_client.serving import sources
from edge_client.serving.sources import (
    MAX_FILE_BYTES,
    MOST_WAITING,
    FolderSource,
    FrigateSource,
    Picture,
    check_folder,
    follow,
    open_source,
    open_sources,
    read_later,
)
from fedvit.errors import ConfigError, DataError, LinkDown
from tests.support.codes import has_code
from tests.support.frigate import write_snapshot
from tests.support.served import encode_picture, split_digits

PICTURE = encode_picture(split_digits(0).stream.pixels[0])


def names(source: FolderSource) -> list[str]:
    return [path.name for path in source.find_new()]


def test_picture_is_new_once_and_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "old.jpg").write_bytes(PICTURE)
    source = FolderSource(tmp_path)
    assert names(source) == []
    file = tmp_path / "new.jpg"
    file.write_bytes(PICTURE[:100])
    assert names(source) == []
    file.write_bytes(PICTURE)
    assert names(source) == [], "it has grown since the last look"
    assert names(source) == ["new.jpg"]
    assert names(source) == []
    os.utime(file, ns=(1, 1))
    assert [*names(source), *names(source)] == ["new.jpg"], "another picture of the same name"
    (tmp_path / "empty.jpg").touch()
    assert [*names(source), *names(source)] == []


@pytest.mark.parametrize("kind", [FolderSource, FrigateSource])
def test_folder_that_is_mounted_again_has_nothing_new(kind: type[FolderSource], tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "pictures", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
    source = kind(folder)
    for number, count in ((1, 0), (2, 1)):
        file = write_snapshot(folder, "yard", number)
        os.utime(file, (1.7e9, 1.7e9))
        assert len([*names(source), *names(source)]) == count
    folder.rename(tmp_path / "unmounted")
    elsewhere.rename(folder)
    assert names(source) == []
    folder.rename(elsewhere)
    (tmp_path / "unmounted").rename(folder)
    assert [*names(source), *names(source)] == []


def test_clock_of_the_files_does_not_matter(tmp_path: Path) -> None:
    source = FolderSource(tmp_path)
    source.find_new()
    for number, time_s in enumerate((4e9, 1.0, 1.7e9)):
        (tmp_path / f"{number}.jpg").write_bytes(PICTURE)
        os.utime(tmp_path / f"{number}.jpg", (time_s, time_s))
    source.find_new()
    assert names(source) == ["1.jpg", "2.jpg", "0.jpg"]


def test_most_pictures_of_one_look(tmp_path: Path) -> None:
    source = FolderSource(tmp_path)
    source.find_new()
    for number in range(MOST_WAITING + 5):
        (tmp_path / f"{number:05}.png").write_bytes(b"x")
    source.find_new()
    assert len(source.find_new()) == MOST_WAITING
    assert source.find_new() == []


def test_newest_pictures_of_a_large_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones do not become new when newer ones are removed."""
    monkeypatch.setattr(sources, "MOST_KNOWN", 3)
    source = FolderSource(tmp_path)

    def add(number: int) -> None:
        (tmp_path / f"{number}.png").write_bytes(PICTURE)
        os.utime(tmp_path / f"{number}.png", (number, number))

    for number in range(6):
        add(number)
    assert names(source) == []
    add(6)
    assert [*names(source), *names(source)] == ["6.png"]
    for number in (4, 5, 6):
        (tmp_path / f"{number}.png").unlink()
    assert [*names(source), *names(source)] == []
    add(7)
    assert [*names(source), *names(source)] == ["7.png"]


def test_frames_that_are_too_large_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "video.avi"
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"MJPG"), 5.0, (64, 64))
    for _ in range(3):
        writer.write(np.zeros((64, 64, 3), np.uint8))
    writer.release()
    source, stop = open_source(str(file), 0.1), threading.Event()
    [picture, *_] = source.pictures(stop)
    assert picture.read(16).shape == (16, 16, 3)
    monkeypatch.setattr(sources, "DECODED_BYTES", 64 * 64 * 3 - 1)
    with pytest.raises(DataError, check=has_code("FV1494")):
        next(iter(source.pictures(stop)))


def test_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=has_code("FV1494")):
        FolderSource(tmp_path / "none").find_new()
    with pytest.raises(ConfigError, check=has_code("FV1494")):
        check_folder(tmp_path / "none", "--watch")


def test_snapshots_of_frigate_without_boxes(tmp_path: Path) -> None:
    """The clean copy of each event, and what was there before is known."""

    def add(event: str) -> None:
        for suffix in (".jpg", "-clean.webp"):
            file = tmp_path / f"yard-{event}{suffix}"
            file.write_bytes(PICTURE)
            os.utime(file, (time.time() - 60, time.time() - 60))

    add("1700000000.5-abcdef")
    source = open_source(f"frigate:{tmp_path}", 1.0)
    assert isinstance(source, FrigateSource)
    assert names(source) == []
    add("1700000001.5-abcdeg")
    assert names(source) == ["yard-1700000001.5-abcdeg-clean.webp"]
    assert names(source) == []


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "huge.png"
    with file.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    for path in (file, tmp_path / "none.png"):
        with pytest.raises(DataError, check=has_code("FV1403")):
            read_later(path).read(16)


class Failing:
    """A source that stops twice."""

    name = "failing"

    def __init__(self, error: Exception) -> None:
        self.opened, self._error = 0, error

    def pictures(self, stop: threading.Event) -> Iterator[Picture]:
        self.opened += 1
        yield read_later(Path(f"{self.opened}.png"))
        if self.opened < 3:
            raise self._error


@pytest.mark.parametrize("error", [LinkDown("FV1494", "it stops"), ValueError("of a driver")])
def test_source_that_stops_is_opened_again(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    source, answered = Failing(error), list[str]()
    follow(source, lambda picture: answered.append(picture.name), threading.Event())
    assert answered == ["1.png", "2.png", "3.png"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def test_cameras_of_one_recorder_have_names_of_their_own() -> None:
    """Drift compares pictures of one source in a row, and lines of results say which camera saw it."""
    address = "rtsp://ann:secret@recorder/realmonitor?channel="
    named = [source.name for source in open_sources([f"{address}1", "0", f"{address}2"], 1.0)]
    assert named == ["rtsp://recorder/realmonitor", "0", "rtsp://recorder/realmonitor (2)"]


def test_a_missing_library_does_not_show_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, check=has_code("FV1495", "rtsp://camera/1")) as raised:
        open_source("rtsp://ann:secret@camera/1", 1.0)
    assert "secret" not in str(raised.value)
