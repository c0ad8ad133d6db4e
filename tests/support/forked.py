"""A program under test as a process of its own that has torch at once: it is forked from one that has imported it.

Importing torch and timm takes ten seconds of a processor, again for every coordinator that a test starts. What is
forked runs the program's `main` with its own arguments, environment, output and signals, and can be killed like any
other. Tests of `fleet run`, `fleet demo` and of the programs' exit codes start them as a user does.
"""

import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "coordinator.rounds.coordinator",
        "coordinator.compute.engine",
        "coordinator.compute.planning.checks",
        "torch._dynamo",  # for those that trace a graph
        "tests.support.frozen",  # last
    ]
)
"""The process to fork from starts with the first fork and ends with the tests."""
WORKERS = 6
"""Worker processes that a coordinator can have, one after the other; they end with it."""
RANKS = 8
"""Processes of the server's training that a worker process can have, where a coordinator is given `cpu:2`."""


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

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

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
    serves = "coordinator.cli" in (module, *arguments) and not {"start", "serve", "evaluate"}.isdisjoint(arguments)
    if serves or (module == "fleet.cli" and "region" in arguments):
        from coordinator.compute import process

        # now, since a process that was forked from one with an open database cannot use it
        spare = [ForkedWorker() for _ in range(WORKERS)]
        process.spawn = spare.pop
    importlib.import_module(module).main()


class ForkedWorker:
    """A coordinator's worker process, forked from the coordinator, which has torch already in these tests.

    What `coordinator.compute.process.spawn` gives, for the real program with pipes of its own. With another `module`,
    what `spawn` of `coordinator.compute.ranks` gives.
    """

    def __init__(self, module: str = "coordinator.compute.worker") -> None:
        requests, replies = os.pipe(), os.pipe()
        self._code: int | None = None
        self._reaping = threading.Lock()  # a thread that closes and one that asks both wait for its end
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_worker(module, requests[0], replies[1])
            except BaseException:  # noqa: BLE001 - nothing of the parent may continue in this process
                traceback.print_exc()
            os._exit(1)
        os.close(requests[0])
        os.close(replies[1])
        self.stdin: IO[bytes] | None = os.fdopen(requests[1], "wb")
        self.stdout: IO[bytes] | None = os.fdopen(replies[0], "rb")

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Its pipe is closed when this is called: it ends at once."""
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        with self._reaping:
            if self._code is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code


class ForkedRank:
    """A process of the server's training: what `coordinator.compute.ranks.spawn` gives, and has torch at once."""

    def __init__(self) -> None:
        (requests, request), (hearing, replies) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=_become_rank, args=(requests, replies), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin: IO[bytes] | None = os.fdopen(os.dup(request.fileno()), "wb")
        self.stdout: IO[bytes] | None = os.fdopen(os.dup(hearing.fileno()), "rb")
        for end in (requests, request, hearing, replies):
            end.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _become_rank(requests: Connection, replies: Connection) -> None:
    os.dup2(requests.fileno(), 0)
    os.dup2(replies.fileno(), 1)
    for end in (requests, replies):
        end.close()
    importlib.import_module("coordinator.compute.rank").main()


def _become_worker(module: str, requests: int, replies: int) -> None:
    """Nothing else of the coordinator's stays open here: its broker and its lock must see it end when it ends."""
    os.setpgid(0, 0)
    os.dup2(requests, 0)
    os.dup2(replies, 1)
    os.closerange(3, 4096)
    logging.getLogger().handlers.clear()
    if module == "coordinator.compute.worker" and "cpu:2" in sys.argv:
        from coordinator.compute import ranks

        # now, since a process that was forked from one that has trained cannot train
        spare = [ForkedWorker("coordinator.compute.rank") for _ in range(RANKS)]
        ranks.spawn = spare.pop
    importlib.import_module(module).main()
