"""Code that runs in a process of its own, so that what it limits or breaks is not ours."""

import subprocess
import sys

from tests.support.waiting import WAIT_S


def in_child(code: str, *arguments: object) -> str:
    """What Python code that succeeds prints; `arguments` are its `sys.argv[1:]`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout
