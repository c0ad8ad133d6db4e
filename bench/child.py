"""Runs one measurement in a fresh process of its own."""

import subprocess
import tempfile
from collections.abc import Callable

from bench.bytecode import with_bytecode
from fedvit.errors import FedvitError
from fleet.processes import program


def run_child(module: str, *arguments: str, what: str, heard: Callable[[str], None] = lambda line: None) -> str:
    """Run `main()` of a module; returns the last line it printed, `heard` gets those before.

    Nothing of the environment is tuned for either side; modules are compiled for both. Raises FedvitError,
    beginning with `what`, when the process fails.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = subprocess.Popen(
            with_bytecode([*program(module), *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        last = ""
        try:
            assert child.stdout is not None  # asked for above
            for line in child.stdout:
                if last:
                    heard(last)
                last = line.rstrip("\n")
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
        if child.returncode != 0:
            said.seek(0)
            lines = said.read().strip().splitlines() or ["it said nothing"]
            raise FedvitError(f"{what} ended with code {child.returncode}: {lines[-1]}")
        return last
