"""`python -m bench`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def take(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_error_of_a_command_is_one_line_and_a_code() -> None:
    done = take("-m", "bench", "step", "--case", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bench: unknown case 'nope', known are ")
    assert len(done.stderr.splitlines()) == 1
