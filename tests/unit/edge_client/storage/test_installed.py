"""Links between versions, marks of a trial, and the starter's answer to them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_client.storage.installed import CURRENT, OWN, Installation
from tests.support.power import recorded

STARTER = Path(__file__).parents[4] / "deploy" / "debian" / "edge" / "program"


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path, "versions/0.2.0", tmp_path / "trial")


def test_program_of_a_wheel_has_no_installation() -> None:
    assert Installation.find({}) is None
    assert Installation.find({"FEDVIT_INSTALLED": "/opt/fedvit"}) is None


def test_link_is_the_old_or_the_new_one(installation: Installation) -> None:
    assert installation.read_link(CURRENT) == OWN
    for folder in ("versions/0.1.0", "versions/0.2.0"):
        installation.set_link(CURRENT, folder)
        assert installation.read_link(CURRENT) == folder
    assert os.listdir(installation.root) == [CURRENT]


@pytest.mark.parametrize(
    ("marks", "is_on_trial", "is_proven"),
    [
        ([], False, True),
        (["start"], True, False),
        (["start", "ready", "task"], True, False),
        (["start", "ready", "task", "done"], False, True),
    ],
)
def test_trial_ends_with_the_first_task(
    installation: Installation, marks: Sequence[str], is_on_trial: bool, is_proven: bool
) -> None:
    for mark in marks:
        installation.mark(mark)
    assert installation.is_on_trial() == is_on_trial
    assert installation.is_proven() == is_proven


def test_marks_that_cannot_be_written_stop_nothing(installation: Installation) -> None:
    installation.marks.mkdir()
    installation.mark("ready")
    assert not installation.is_on_trial()


# --- the starter --------------------------------------------------------------------------------------

START, READY, TASK, END, DONE, FAILED = "start", "ready", "task", "end", "done", "failed"
SERVICE = {"NOTIFY_SOCKET": "/nowhere"}


def start(root: Path, marks: Sequence[str], *, links: Sequence[str] = (), **variables: str) -> tuple[str, list[str]]:
    """Start the program of an installation with versions 0.2.0 and 0.3.0; return what runs, and the marks after it."""
    for folder in (".", "versions/0.2.0", "versions/0.3.0"):
        python = root / folder / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/sh\necho "$FEDVIT_VERSION"\n')
        python.chmod(0o755)
    program = root / "bin" / "edge-client"
    program.write_bytes(STARTER.read_bytes())
    program.chmod(0o755)
    for name, target in zip(("current", "former"), links, strict=False):
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)
    trial = root / "trial"
    trial.write_text("".join(f"{mark}\n" for mark in marks))
    environment = {"PATH": os.environ["PATH"], "FEDVIT_TRIAL": str(trial), **variables}
    done = subprocess.run([program, "status"], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.strip(), trial.read_text().splitlines()[len(marks) :]


def of(version: str, *marks: str) -> list[str]:
    return [f"{version} {mark}" for mark in marks]


NEW, OLD = "versions/0.3.0", "versions/0.2.0"


@pytest.mark.parametrize(
    ("marks", "started"),
    [
        (of("0.3.0"), NEW),
        (of("0.3.0", START, START), NEW),
        (of("0.3.0", START, START, START), OLD),
        (of("0.3.0", START, READY, START, READY, START, READY, START, READY), NEW),  # no task came yet
        (of("0.3.0", *3 * [START, READY, TASK]), OLD),  # it died in each of three tasks
        (of("0.3.0", *4 * [START, READY, TASK, END]), NEW),  # of which the device was not the reason
        (of("0.3.0", START, READY, TASK, FAILED), OLD),
        (of("0.3.0", START, START, START, DONE, FAILED), NEW),
        (of("0.2.0", START, START, START) + of("0.3.0", START), NEW),
        (of("0.2.0", START, START, START) + of("0.3.0", FAILED), OWN),
        (of("0x3x0", START, START, START), NEW),
        (["\0\0", "0.3.0 sta0.3.0 start", *of("0.3.0", START, START)], NEW),  # after a power cut
    ],
)
def test_version_that_failed_is_left(tmp_path: Path, marks: list[str], started: str) -> None:
    assert start(tmp_path, marks, links=(NEW, OLD)) == (started, [])


def test_starts_of_the_service_count_until_a_task_is_done(tmp_path: Path) -> None:
    links = (NEW, OLD)
    assert start(tmp_path, [], links=links, **SERVICE) == (NEW, of("0.3.0", START))
    assert start(tmp_path, of("0.3.0", DONE), links=links, **SERVICE) == (NEW, [])
    assert start(tmp_path, of("0.3.0", FAILED), links=links, **SERVICE) == (OLD, of("0.2.0", START))
    assert start(tmp_path, [], links=(OWN, OWN), **SERVICE) == (OWN, [])


@pytest.mark.parametrize("links", [(), ("versions/9", "versions/8"), ("versions/9", "."), (".", "versions/0.2.0")])
def test_installation_that_lost_its_versions_starts_its_own(tmp_path: Path, links: Sequence[str]) -> None:
    assert start(tmp_path, [], links=links, **SERVICE)[0] == OWN


def test_starter_without_marks_file(tmp_path: Path) -> None:
    assert start(tmp_path, [], links=(NEW,), FEDVIT_TRIAL=str(tmp_path / "no" / "trial"))[0] == NEW


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_starter_reads_no_other_file_than_marks(tmp_path: Path, kind: str) -> None:
    """A service that was taken over cannot make root's programs wait."""
    place = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    assert start(tmp_path, [], links=(NEW, OLD), FEDVIT_TRIAL=str(place), **SERVICE)[0] == NEW


def test_link_is_durable_when_it_is_set(tmp_path: Path) -> None:
    """One rename, and a sync of its folder. Marks are appended without a sync: a lost one costs a start."""
    installation = Installation(tmp_path / "root", "versions/0.2.0", tmp_path / "trial")
    installation.root.mkdir()
    with recorded(installation.root) as ops:
        installation.set_link(CURRENT, "versions/0.2.0")
    assert [op.kind for op in ops] == ["rename", "syncdir"]
