"""A real `coordinator dashboard` in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import WAIT_S

COMMAND = [str(Path(sys.executable).with_name("coordinator")), "dashboard"]


def environment(password: str | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return kept | ({"FEDVIT_DASHBOARD_PASSWORD": password} if password else {})


@contextmanager
def served(folder: Path, *flags: str, password: str | None = None) -> Iterator[str]:
    """The address of a dashboard of these runs, without the last slash; it ends by Ctrl-C, and says nothing else.

    Without a password its address is that of `read_address`.
    """
    command = [*COMMAND, "--runs", str(folder), "--port", "0", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(password)
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        found = re.match(r"dashboard: (http://\S+)/ ", line)
        assert found, line + process.stderr.read()
        yield found[1]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=WAIT_S)
    assert errors == ""


def read_address(folder: Path, address: str) -> str:
    """The address with the token of a dashboard without a password."""
    return (folder / f"dashboard-{address.rpartition(':')[2]}.url").read_text().strip()
