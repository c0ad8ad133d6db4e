"""A program under test as a process of its own that has torch at once: it is forked from one that has imported it.

Importing torch and timm takes ten seconds of a processor, again for every coordinator that a test starts. What is
forked runs the program's `main` with its own arguments, environment, output and signals, and can be killed like any
other. Tests of `fleet run`, `fleet demo` and of the programs' exit codes start them as a user does.
"""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["coordinator.rounds"])
"""The process to fork from starts with the first fork and ends with the tests."""


class Forked:
    """What tests use of `subprocess.Popen`, for `python -c "from MODULE import main; main()" ARGUMENTS`."""

    def __init__(self, module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.args = [module, *arguments]
        log.touch()  # tests look into it at once
        self._process = FORKS.Process(target=_run, args=(module, arguments, log, environment), name=module)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """In the forked process."""
    os.environ.clear()
    os.environ.update(environment)
    os.umask(0o022)  # as most systems have it, so that what must be private is so by the program's own doing
    with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
        for source, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source.fileno(), number)
    sys.argv = ["-c", *arguments]
    importlib.import_module(module).main()
