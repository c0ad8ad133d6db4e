"""`python -m bench`: its commands, and an error as one line and a code."""

import subprocess
import sys
from pathlib import Path

from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[3]
COMMANDS = (
    "analytic",
    "api",
    "bytes",
    "cap",
    "failover",
    "profile",
    "rounds",
    "secure",
    "server",
    "simulate",
    "step",
    "store",
    "wire",
)


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


def test_commands_are_listed() -> None:
    lines = run_bench("--help").stdout.partition("Commands:")[2].splitlines()
    assert tuple(line.split()[0] for line in lines if line.strip()) == COMMANDS


def test_error_of_a_command_is_one_line_and_a_code() -> None:
    done = run_bench("step", "--case", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: unknown case 'nope', known are ")
    assert len(done.stderr.splitlines()) == 1
