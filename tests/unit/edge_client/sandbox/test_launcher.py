"""The process that forks others: what it and they have of the device's environment and files."""

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from edge_client.sandbox.launcher import Launcher
from tests.support.waiting import wait_until

STORE = ".onnxruntime"
"""Folder in which the engine keeps the machine's number and its reports, in the home of the user."""


def find_open_files(pid: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


@pytest.mark.parametrize("anew", [False, True], ids=["forked", "started anew"])
def test_the_engine_does_not_report_to_its_maker(anew: bool) -> None:
    """The environment of these processes was cleared, and with it what turns the engine's telemetry off."""
    with closing(Launcher()) as launcher:
        if anew:
            os.kill(launcher.pid, signal.SIGKILL)
        connection, pid = launcher.launch()
        with connection:
            wait_until(lambda: "onnxruntime" in Path(f"/proc/{pid}/maps").read_text(), "the engine is not loaded")
            for each in (launcher.pid, pid):
                assert not [file for file in find_open_files(each) if STORE in file]
