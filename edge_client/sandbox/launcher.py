"""Forks the processes that run graphs.

A small process does it that was forked itself when the device started: it has no threads, no keys and no connection,
shares its memory with the device, and has the engine loaded after the first task, so that another process is ready
within milliseconds.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import NoReturn

from edge_client.sandbox.confine import die_with_parent
from edge_client.sandbox.worker import serve_requests
from fedvit import disable_telemetry
from fedvit.engine import load_engine


class Launcher:
    """The process that forks others. Make it before any thread starts, and before keys are read."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.pid = os.fork()
            if not self.pid:
                _run_alone(_fork_on_request, theirs, with_parent=True)

    def launch(self) -> tuple[Connection, int]:
        """Fork a process; return the connection to it, and its pid. Raises OSError."""
        try:
            return self._launch()
        except (EOFError, OSError):  # it was killed
            self._start_anew()
            try:
                return self._launch()
            except EOFError as error:
                raise OSError("the process that starts others ended twice") from error

    def _launch(self) -> tuple[Connection, int]:
        ours, theirs = Pipe()
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            self._connection.send_bytes(b"fork")
            send_handle(self._connection, theirs.fileno(), self.pid)
            pid = int.from_bytes(self._connection.recv_bytes(8), "little")
            failed.pop_all()
        return ours, pid

    def _start_anew(self) -> None:
        """Start a new program: this process has keys and threads by now, and must not be forked again."""
        self.close()
        self._connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "edge_client.sandbox.launcher", str(theirs.fileno())]
            self.pid = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env={}).pid

    def close(self) -> None:
        """End the launcher, and with it all processes that it forked."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _fork_on_request(connection: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    while True:
        connection.recv_bytes(4)
        with Connection(recv_handle(connection)) as theirs:
            load_engine()
            gc.freeze()  # a collection would write to pages that all processes share
            if not (pid := os.fork()):
                _run_alone(serve_requests, theirs, with_parent=True)
            connection.send_bytes(pid.to_bytes(8, "little"))


def _run_alone(work: Callable[[Connection], None], connection: Connection, *, with_parent: bool) -> NoReturn:
    """Do the work of a process that has one connection and nothing else of its parent's, and end it."""
    code = 1
    try:
        if with_parent:
            die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # of a terminal's group: the device decides when they end
        os.environ.clear()
        disable_telemetry()  # the engine is loaded below
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        work(connection)
        code = 0
    except (EOFError, OSError):  # the other side has ended
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    # the parent's thread that started this may end before the parent does
    _run_alone(_fork_on_request, Connection(int(sys.argv[1])), with_parent=False)
