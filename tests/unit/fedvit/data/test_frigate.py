"""Snapshots of Frigate: which file counts, and which class it has."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedvit.data import frigate
from fedvit.data.folder import DeviceData
from fedvit.data.frigate import list_snapshots
from fedvit.data.growing import GrowingFolder
from fedvit.errors import DataError
from tests.support.codes import has_code
from tests.support.frigate import encode, event_id, write_events, write_snapshot


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Four snapshots of a door and three of a yard, and Frigate's other files."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(7):
        write_snapshot(folder, "front-door" if number < 4 else "yard", number, encode(shade=number * 30))
    for name in ("previews", "faces"):
        (folder / name).mkdir()
        write_snapshot(folder / name, "yard", 99)
    (folder / "notes.txt").write_text("x")
    (folder / f"yard-{event_id(50)}.json").write_text("x")
    return folder


def describe(clips: Path, toml: str) -> dict[str, str]:
    """Read the folder with these settings; return the class of each event that is used."""
    (clips / "frigate.toml").write_text(toml)
    data = DeviceData.open(clips)
    return {
        path.name: data.classes[label]
        for part in (data.train, data.test)
        for path, label in zip(part.paths, part.labels, strict=True)
    }


def names(clips: Path, toml: str) -> dict[int, str]:
    found = describe(clips, toml)
    return {number: name for number in range(100) for file, name in found.items() if event_id(number) in file}


def test_class_of_a_camera(clips: Path) -> None:
    found = names(clips, '[cameras]\nfront-door = "visitor"\nyard = "animal"\n')
    assert found == {**dict.fromkeys(range(4), "visitor"), **dict.fromkeys((4, 5, 6), "animal")}


def test_labels_of_events(clips: Path) -> None:
    """The sub label comes first, in its old form with a score, too; an owner's own word wins over all."""
    events = {0: ("person", "ann"), 1: ("person", ["bob", 0.9]), 2: ("dog", None), 3: ("cat", ""), 4: ("car", None)}
    write_events(clips, events)
    assert names(clips, "") == {0: "ann", 1: "bob", 2: "dog", 3: "cat", 4: "car"}
    toml = f'[events]\n"{event_id(4)}" = "van"\n[labels]\nann = "family"\nperson = "person"\ncat = "pet"\ndog = "pet"\n'
    assert names(clips, toml) == {0: "family", 1: "person", 2: "pet", 3: "pet", 4: "van"}
    assert names(clips, '[labels]\ncar = "car"\n[cameras]\nyard = "other"\n') == {4: "car", 5: "other", 6: "other"}
    data = DeviceData.open(clips)
    assert [reason for _, reason in data.problems()] == [frigate.NO_CLASS] * 4


def test_copy_without_boxes_counts_once(clips: Path) -> None:
    write_snapshot(clips, "yard", 5, end="-clean.webp")
    write_snapshot(clips, "yard", 6, end="-clean.png")
    files = describe(clips, '[cameras]\nyard = "animal"\n')
    assert sorted(files) == [
        f"yard-{event_id(4)}.jpg",
        f"yard-{event_id(5)}-clean.webp",
        f"yard-{event_id(6)}-clean.png",
    ]


def test_file_that_is_being_written_waits(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frigate, "SETTLED_S", 1200.0)  # however slow this machine is
    (clips / "frigate.toml").write_text('[cameras]\nyard = "animal"\n')
    folder = GrowingFolder(clips, split_file=tmp_path / "split.json", test_share=0.0)
    assert len(folder.data.train) == 3
    fresh = write_snapshot(clips, "yard", 8, encode()[:200], age_s=0.0)
    write_snapshot(clips, "yard", 5, end="-clean.png", age_s=0.0)
    assert folder.look()
    assert {path.name for path in folder.data.train.paths} == {f"yard-{event_id(number)}.jpg" for number in (4, 6)}
    fresh.write_bytes(encode())
    for path in clips.glob("yard-*"):
        os.utime(path, (time.time() - 3600,) * 2)
    assert folder.look()
    assert len(folder.data.train) == 4
    assert not folder.look()
    assert {reason for _, reason in folder.data.problems()} == {frigate.NO_CLASS}


def test_file_that_frigate_removes_meanwhile_is_left_out(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    @contextmanager
    def remove_while_listing(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            listed = list(entries)
        [gone] = [entry.path for entry in listed if event_id(1) in entry.name]
        os.remove(gone)
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", remove_while_listing)
    assert len(list_snapshots(clips)) == 6


def test_file_with_a_time_in_the_future_counts(clips: Path) -> None:
    """The clock was set back."""
    write_snapshot(clips, "yard", 8, age_s=-3600)
    assert 8 in names(clips, '[cameras]\nyard = "animal"\n')


def test_changed_labels_are_seen(clips: Path, tmp_path: Path) -> None:
    (clips / "frigate.toml").write_text('[cameras]\nyard = "animal"\n')
    folder = GrowingFolder(clips, split_file=tmp_path / "split.json")
    (clips / "frigate.toml").write_text(f'[cameras]\nyard = "animal"\n[events]\n"{event_id(4)}" = "person"\n')
    assert folder.look()
    assert folder.data.classes == ("animal", "person")


def test_newest_events_count(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frigate, "MOST_SNAPSHOTS", 2)
    assert names(clips, '[cameras]\nyard = "animal"\nfront-door = "visitor"\n') == {5: "animal", 6: "animal"}


@pytest.mark.parametrize(
    ("toml", "events", "code", "word"),
    [
        ("[cameras", None, "FV1437", "frigate.toml"),
        ("[camera]\nx = 'y'", None, "FV1437", "camera"),
        ("[cameras]\nyard = 3", None, "FV1437", "int"),
        ("[cameras]\nyard = 'a/b'", None, "FV1437", "a/b"),
        ("[cameras]\nyard = ''", None, "FV1437", "printable"),
        ("", "{}", "FV1437", "/api/events"),
        ("", '[{"id": 3}]', "FV1437", "frigate-events.json"),
        ("", '[{"id\udcff": "3"}]', "FV1437", "frigate-events.json"),
        ("", "[]", "FV1402", "no snapshot has a class"),
        ("[cameras]\nother = 'x'", None, "FV1403", "images for training"),
    ],
)
def test_mistakes(clips: Path, toml: str, events: str | None, code: str, word: str) -> None:
    (clips / "frigate.toml").write_text(toml)
    if events is not None:
        (clips / "frigate-events.json").write_text(events, errors="surrogateescape")
    with pytest.raises(DataError, check=has_code(code, word)):
        DeviceData.open(clips)
