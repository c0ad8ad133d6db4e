"""`python -m bench`, and what `fleet` says of the commands that it had before."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def take(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("old", ["bench step --steps 5", "chaos --fault 'a b'", "fuzz", "pentest"])
def test_old_command_names_in_one_line_the_one_that_replaces_it(old: str) -> None:
    done = take("-c", "from fleet.cli import main; main()", *shlex.split(old), "--help")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    new = f"python -m {old}" if old.startswith("bench") else f"python -m bench {old}"
    first, _, command = line.partition("source: ")
    assert first.startswith(f"fleet: `fleet {old.split()[0]}` is no longer installed")
    assert command == f"{new} --help"
    help_of_it = take(*shlex.split(command)[1:])
    assert help_of_it.returncode == 0, help_of_it.stderr
    assert help_of_it.stdout.startswith(f"Usage: {new.partition(' --')[0]} ")


def test_error_of_a_command_is_one_line_and_a_code() -> None:
    done = take("-m", "bench", "step", "--case", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: unknown case 'nope', known are ")
    assert len(done.stderr.splitlines()) == 1
