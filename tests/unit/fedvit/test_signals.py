"""Programs that are asked to end, in processes of their own."""

import signal
import subprocess
import sys

import pytest

from tests.support.waiting import WAIT_S

WAITING = """
import os, signal
from fedvit.signals import stop_on_signals
stop = stop_on_signals()
with stop._cond:  # as in the moment in which `wait` begins or ends
    os.kill(os.getpid(), signal.{name})
    os.getppid()
stop.wait()
print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_the_moment_in_which_a_program_waits(number: signal.Signals) -> None:
    command = [sys.executable, "-c", WAITING.format(name=number.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "stopped\n"
