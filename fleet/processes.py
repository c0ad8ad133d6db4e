"""Starts and stops the two programs as operating-system processes, none of which outlives its parent."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment in which OpenMP's threads do not spin while they wait: on cores that are shared, torch's server step took
ten times as long."""
STOP_S = 20.0
"""Longest wait for a process to end on SIGTERM, before it is killed."""


def program(module: str) -> list[str]:
    """Return the command line of a program under this Python, with or without scripts on the PATH.

    `-P` keeps the current folder off the module path, as for an installed script: a user's `export.py` is not ours.
    """
    return [sys.executable, "-P", "-c", f"from {module} import main; main()"]


def log_text(log: Path) -> str:
    """Read the log of a process; empty without a file."""
    return log.read_text(errors="replace") if log.is_file() else ""


def last_line(log: Path) -> str:
    return last_line_of(log_text(log))


def last_line_of(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def _end_with_parent(signal_number: int) -> None:
    """In the child: request this signal for when the parent dies, even by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)


class Fleet:
    """A set of child processes that end together; use as a context manager.

    They receive the signal `ends_with_parent` when this process dies.
    """

    def __init__(self, *, ends_with_parent: int = signal.SIGTERM) -> None:
        self._ends_with_parent = ends_with_parent
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in its own session, so that Ctrl-C reaches only this process, which then stops it.

        With `log`, its output goes there; else it shares our standard error. `folder` is its current one.
        `environment` is added to ours.
        """
        output: IO[bytes] | int = sys.stderr.fileno()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = open(log, "ab")  # noqa: SIM115 - closed in stop
            self._logs.append(output)
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**PASSIVE_THREADS, **os.environ, **(environment or {})},
            preexec_fn=partial(_end_with_parent, self._ends_with_parent),
            cwd=folder,
        )
        self._running[name] = process
        return process

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the processes that have ended, by name."""
        return {name: process.returncode for name, process in self._running.items() if process.poll() is not None}

    def wait(self, names: Sequence[str], timeout_s: float) -> bool:
        """Wait; return True if all of `names` ended by themselves within the time."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if set(names) <= self.exit_codes().keys():
                return True
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """Terminate every process, last started first, and kill those that do not end within STOP_S."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + STOP_S
        for process in self._running.values():
            try:
                process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self._running.clear()
        self._logs.clear()
