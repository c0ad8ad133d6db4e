"""Regular work of a service: whatever goes wrong in it is said, and it begins again when it is due."""

import threading

import pytest

from coordinator.rounds.service.regular import RegularWork


@pytest.mark.parametrize("error", [OSError(28, "no space left"), ValueError("no such value"), RuntimeError()])
def test_error_is_said_and_the_work_begins_again(error: Exception) -> None:
    lines, calls, done = list[str](), list[bool](), threading.Event()

    def work(stop: threading.Event) -> str:
        calls.append(stop.is_set())
        if len(calls) == 1:
            raise error
        done.set()
        return "9 files"

    regular = RegularWork("backup", 1e-9, work, lines.append)
    try:
        while not done.wait(0.01):
            regular.watch()
    finally:
        regular.close()
    assert lines[0] == f"backup: {str(error) or 'RuntimeError'}"
    assert "backup: 9 files" in lines
