"""`make test` installs Debian packages beside another apt."""

import fcntl
import os
import subprocess
from pathlib import Path

import psutil

from tests.support.waiting import WAIT_S, wait_until

SCRIPT = Path(__file__).parents[1] / "support" / "apt_install.sh"
SETTINGS = """
Dir::State "{0}/state";
Dir::State::status "{0}/dpkg/status";
Dir::Cache "{0}/cache";
Dir::Log "{0}/log";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "/dev/null";
"""
"""An apt with files of its own and no servers, so that the machine's is left alone."""


def test_the_lists_of_another_apt_are_waited_for(tmp_path: Path) -> None:
    for folder in ("state/lists/partial", "dpkg", "cache/archives/partial", "log"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "dpkg" / "status").touch()
    (tmp_path / "apt.conf").write_text(SETTINGS.format(tmp_path))
    environment = {**os.environ, "APT_CONFIG": str(tmp_path / "apt.conf")}
    with (tmp_path / "state" / "lists" / "lock").open("w") as other:
        fcntl.lockf(other, fcntl.LOCK_EX)
        process = subprocess.Popen([SCRIPT], env=environment, stderr=subprocess.PIPE, text=True)
        children = psutil.Process(process.pid).children
        wait_until(
            lambda: process.poll() is not None or "sleep" in [child.name() for child in children()], wait_s=WAIT_S
        )
        assert process.poll() is None, "it did not wait"
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, said
