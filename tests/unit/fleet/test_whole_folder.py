"""A folder takes its place whole, and what a killed process left is tidied up."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.whole_folder import make_whole

WRITER = """
import os, sys, signal
from pathlib import Path
from fleet.whole_folder import make_whole
with make_whole(Path(sys.argv[1])) as partial:
    (partial / "half").touch()
    print(partial.name, flush=True)
    sys.stdin.read()
"""


def start_writer(out: Path) -> "tuple[subprocess.Popen[str], str]":
    """Start a process that writes half a folder; return it and the name of what it writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def write(out: Path, name: str) -> None:
    with make_whole(out) as partial:
        (partial / name).touch()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    process, left = start_writer(tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert names(tmp_path) == [left]
    write(tmp_path / "out", "whole")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["whole"]


def test_what_another_process_writes_stays(tmp_path: Path) -> None:
    process, written = start_writer(tmp_path / "out")
    write(tmp_path / "out", "first")
    assert names(tmp_path) == [written, "out"]
    process.communicate("")
    assert process.returncode == 0
    assert names(tmp_path / "out") == ["half"], "the later one replaces the earlier one"


@pytest.mark.parametrize("has_new", [False, True])
def test_killed_while_it_replaces_loses_nothing(tmp_path: Path, has_new: bool) -> None:
    """The former folder has another name for an instant."""
    out, former = tmp_path / "out", tmp_path / ".out.1.replaced"
    former.mkdir()
    (former / "kept").touch()
    if has_new:
        write(out, "whole")
        former.mkdir(exist_ok=True)
    with pytest.raises(RuntimeError), make_whole(out):
        raise RuntimeError
    assert names(tmp_path) == ["out"]
    assert names(out) == (["whole"] if has_new else ["kept"])
