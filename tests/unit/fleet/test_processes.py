"""No process is left behind, however its parent ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleet import processes
from fleet.processes import Fleet, program
from tests.support.waiting import WAIT_S, wait_until

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
POLITE = """
import signal, sys, time
def leave(*_):
    print('leaving', flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, leave)
print('ready', flush=True)
time.sleep(600)
"""
PARENT = """
import pathlib, sys, time
from fleet.processes import Fleet
with Fleet() as fleet:
    for name in ("a", "b"):
        child = fleet.start(name, [sys.executable, "-c", sys.argv[2]], pathlib.Path(sys.argv[1]) / name)
        print(child.pid, flush=True)
    time.sleep(600)
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def ready(log: Path) -> None:
    """Wait until a child has printed it."""
    wait_until(lambda: log.exists() and "ready" in log.read_text(), "the child did not begin")


def is_gone(pid: int) -> bool:
    """Ended; where no process collects orphans they stay as zombies."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def gone(*pids: int) -> None:
    wait_until(
        lambda: all(is_gone(pid) for pid in pids), lambda: f"still there: {[pid for pid in pids if not is_gone(pid)]}"
    )


def test_stop_asks_every_child_to_end(tmp_path: Path) -> None:
    fleet = Fleet()
    children = [fleet.start(str(number), python(POLITE), tmp_path / "logs" / str(number)) for number in range(3)]
    for number in range(3):
        ready(tmp_path / "logs" / str(number))
    assert fleet.exit_codes() == {}
    fleet.stop()
    assert [child.returncode for child in children] == [7, 7, 7]
    assert (tmp_path / "logs" / "0").read_text().split() == ["ready", "leaving"]
    fleet.stop()  # nothing is left to stop


def test_an_error_ends_the_children_too(tmp_path: Path) -> None:
    def fail() -> None:
        with Fleet() as fleet:
            fleet.start("a", python(SLEEPER), tmp_path / "a")
            started.extend(fleet._running.values())
            ready(tmp_path / "a")
            raise RuntimeError("something else went wrong")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(RuntimeError):
        fail()
    assert started[0].returncode == -signal.SIGTERM


def test_a_child_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others need not wait for it."""
    monkeypatch.setattr(processes, "STOP_S", 0.3)
    fleet = Fleet()
    polite = fleet.start("polite", python(POLITE), tmp_path / "polite")
    stubborn = fleet.start("stubborn", python(STUBBORN), tmp_path / "stubborn")
    ready(tmp_path / "polite")
    ready(tmp_path / "stubborn")
    fleet.stop()
    assert (polite.returncode, stubborn.returncode) == (7, -signal.SIGKILL)


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """On Linux, which tells a child of its parent's death."""
    parent = subprocess.Popen([*python(PARENT), str(tmp_path), SLEEPER], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    ready(tmp_path / "a")
    ready(tmp_path / "b")
    assert not any(is_gone(pid) for pid in pids)
    parent.kill()
    parent.communicate()
    gone(*pids)


def test_who_ended_and_how(tmp_path: Path) -> None:
    with Fleet() as fleet:
        fleet.start("good", python("pass"), tmp_path / "good")
        fleet.start("bad", python("raise SystemExit(3)"), tmp_path / "bad")
        fleet.start("going", python(SLEEPER), tmp_path / "going")
        assert fleet.wait(["good", "bad"], WAIT_S)
        assert fleet.exit_codes() == {"good": 0, "bad": 3}
        assert not fleet.wait(["good", "going"], 0.2)
        os.kill(fleet._running["going"].pid, signal.SIGKILL)
        assert fleet.wait(["going"], WAIT_S)
        assert fleet.exit_codes()["going"] == -signal.SIGKILL


def test_ctrl_c_at_the_terminal_reaches_us_alone(tmp_path: Path) -> None:
    """Children have sessions of their own: we stop them in order instead."""
    with Fleet() as fleet:
        child = fleet.start("a", python(SLEEPER), tmp_path / "a")
        assert os.getsid(child.pid) == child.pid != os.getsid(0)


def test_log_keeps_output_of_earlier_processes(tmp_path: Path) -> None:
    for word in ("one", "two"):
        with Fleet() as fleet:
            fleet.start("a", python(f"import sys; print('{word}'); print('{word}!', file=sys.stderr)"), tmp_path / "a")
            assert fleet.wait(["a"], WAIT_S)
    assert sorted((tmp_path / "a").read_text().split()) == ["one", "one!", "two", "two!"]


def test_our_programs_can_be_started_without_scripts_on_the_path(tmp_path: Path) -> None:
    with Fleet() as fleet:
        fleet.start("edge", [*program("edge_client.cli"), "--version"], tmp_path / "edge")
        assert fleet.wait(["edge"], WAIT_S)
        assert fleet.exit_codes() == {"edge": 0}
    assert "0.1.0" in (tmp_path / "edge").read_text()
