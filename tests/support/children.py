"""Code that runs in a process of its own, so that what it limits or breaks is not ours."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from tests.support.waiting import WAIT_S


def in_child(code: str, *arguments: object) -> str:
    """What Python code that succeeds prints; `arguments` are its `sys.argv[1:]`."""
    done = run_child([sys.executable, "-c", code, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_child(command: Iterable[object], **settings: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, and keep what it writes; `settings` are those of `subprocess.run`."""
    return subprocess.run(
        [*map(str, command)], **{"check": False, **settings}, capture_output=True, text=True, timeout=WAIT_S
    )
