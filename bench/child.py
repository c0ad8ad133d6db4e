"""Runs one measurement in a fresh process."""

import subprocess
import tempfile
from collections.abc import Callable

from bench.bytecode import with_bytecode
from fedvit.errors import FedvitError
from fleet.processes import last_line_of, program


def run_child(module: str, *arguments: str, what: str, on_line: Callable[[str], None] = lambda line: None) -> str:
    """Run `main()` of a module and return the last line that it printed; `on_line` gets the earlier ones.

    The environment is not tuned; modules are compiled. Raises FedvitError, beginning with `what`, when the process
    fails.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            with_bytecode([*program(module), *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        last = ""
        try:
            assert child.stdout is not None  # asked for above
            for line in child.stdout:
                if last:
                    on_line(last)
                last = line.rstrip("\n")
        except BaseException:
            child.kill()
            raise
        finally:
            child.wait()
        if child.returncode != 0:
            errors.seek(0)
            raise FedvitError(f"{what} ended with code {child.returncode}: {last_line_of(errors.read())}")
        return last
