"""The compute side of a run in a process of its own, which is restarted whenever it dies.

Requests and answers are length-prefixed msgpack on the pipes of the process. It ends when its standard input does,
also after `kill -9` of this process.
"""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Protocol, TypeVar

import msgspec
from msgspec import Struct

from coordinator.compute.integrity import DamagedBlob
from coordinator.compute.messages import AnyRequest, Check, ComputeRequest, Prepare
from coordinator.compute.pipes import close, read_frame, write_frame
from coordinator.config import RunConfig
from fedvit import errors
from fedvit.errors import DeviceTrouble, FedvitError, LinkDown

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

DEATHS = 3
"""The run fails if the process dies this many times during one request."""
BACK_OFF_S = 1.0
"""Wait before the second restart in a row; it doubles with each further restart."""
END_S = 2.0
"""Longest wait for a process that has closed its pipe."""

# --- messages on the pipes --------------------------------------------------------------------------------


class Begin(Struct, frozen=True, kw_only=True, tag=True):
    """Names the run of all later requests except Check; it has no answer."""

    run: str
    config: RunConfig
    folder: str
    log: str  # file for the log and the standard error of the process
    graph_cache: str | None


class WorkerProgress(Struct, frozen=True, tag=True):
    """Describes the current step."""

    text: str


class Warned(Struct, frozen=True, tag=True):
    """A message for the operator about the child processes of the worker."""

    text: str


class Answered(Struct, frozen=True, kw_only=True, tag=True):
    value: msgspec.Raw
    damaged: list[str]  # digests of blobs that were found damaged


class Raised(Struct, frozen=True, kw_only=True, tag=True):
    """A request failed; `kind` is the name of an exception of fedvit.errors, DamagedBlob or OSError, or empty."""

    kind: str
    text: str
    code: str = FedvitError.general_code
    errno: int | None = None
    path: str = ""
    digest: str = ""
    damaged: list[str] = []


Reply = WorkerProgress | Warned | Answered | Raised


def encode_error(error: Exception, damaged: list[str]) -> Raised:
    """Encode an exception; `kind` stays empty for an unexpected one."""
    if isinstance(error, DamagedBlob):
        return Raised(kind="DamagedBlob", text=str(error), path=str(error.path), digest=error.digest, damaged=damaged)
    if isinstance(error, FedvitError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return Raised(kind=kind.__name__, code=error.code, text=str(error), damaged=damaged)
    if isinstance(error, OSError):
        path = str(error.filename or "")
        return Raised(kind="OSError", text=error.strerror or str(error), errno=error.errno, path=path, damaged=damaged)
    return Raised(kind="", text=f"{type(error).__name__}: {error}", damaged=damaged)


def exception_of(raised: Raised, log_file: Path | None) -> Exception:
    """Decode an exception."""
    if raised.kind == "DamagedBlob":
        return DamagedBlob(raised.digest, Path(raised.path))
    if raised.kind == "OSError":
        return OSError(raised.errno, raised.text, *([raised.path] if raised.path else []))
    if raised.kind:
        kind: type[FedvitError] = getattr(errors, raised.kind)
        return kind(raised.code, raised.text)
    where = f"; its log has the traceback: {log_file}" if log_file else ""
    return FedvitError("FV1510", f"the worker process failed unexpectedly: {raised.text}{where}")


# --- the process ------------------------------------------------------------------------------------------


class Child(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def spawn() -> Child:
    """Start a process. Ctrl-C in the terminal does not reach it: an interrupted run closes its pipe."""
    command = [sys.executable, "-P", "-m", "coordinator.compute.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


class _Died(Exception):
    """The process ended during a request."""


class Worker:
    """The worker process of `Compute`. `start` or the first request starts it.

    If the process dies during a request, the request is repeated in a new process, which first receives the run again.
    Raises DeviceTrouble after DEATHS deaths, FedvitError if the process fails unexpectedly.
    """

    def __init__(self) -> None:
        self.progress: Callable[[str], None] = lambda text: None
        self._child: Child | None = None
        self._begin: Begin | None = None
        self._prepare: Prepare | None = None
        self._begun = self._prepared = False  # whether the current process has received them
        self._died = 0  # deaths in a row
        self._start_at = 0.0  # earliest restart, on the monotonic clock
        self._busy = threading.Lock()
        self._closed = threading.Event()
        self._damaged: SimpleQueue[str] = SimpleQueue()
        self._warnings: SimpleQueue[str] = SimpleQueue()

    @property
    def pid(self) -> int | None:
        """Id of the current process; None before the first start."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the process early, so that it loads torch in the meantime."""
        if self._child is None:
            self._child = spawn()

    def begin(
        self, *, run: str, config: RunConfig, folder: Path, log_file: Path, graph_cache: Path | None = None
    ) -> None:
        """Set the run of all further requests."""
        cache = str(graph_cache) if graph_cache else None
        self._begin = Begin(run=run, config=config, folder=str(folder), log=str(log_file), graph_cache=cache)
        self.start()
        log.info("worker process", extra={"pid": self.pid})

    def ask(self, request: ComputeRequest[Answer]) -> Answer:
        with self._busy:
            deaths = 0
            while True:
                try:
                    child = self._ready()
                    self._prepare_process(child, request)
                    answer: Answer = self._exchange(child, request)
                except _Died as died:
                    deaths += 1
                    if deaths == DEATHS:
                        raise DeviceTrouble("FV1510", self._out_of_attempts(str(died), request)) from None
                    continue
                self._died = 0
                if isinstance(request, Prepare):
                    self._prepare, self._prepared = request, True
                return answer

    def damaged(self) -> list[str]:
        return drain(self._damaged)

    def take_warnings(self) -> list[str]:
        if self._busy.acquire(blocking=False):  # otherwise the asking thread handles it
            try:
                if self._child and self._child.poll() is not None:
                    self._note_death()
                if self._child is None and time.monotonic() >= self._start_at:
                    self._start_again()
            finally:
                self._busy.release()
        return drain(self._warnings)

    def close(self) -> None:
        self._closed.set()
        if self._child:
            self._child.kill()
            self._child.wait()

    # --- requests -----------------------------------------------------------------------------------------

    def _prepare_process(self, child: Child, request: ComputeRequest[Answer]) -> None:
        """Send a new process the run and its plan, since it knows nothing of an earlier process."""
        if isinstance(request, Check):
            return
        if self._begin and not self._begun:
            self._send(child, self._begin)
            self._begun = True
        if self._prepare and not self._prepared and not isinstance(request, Prepare):
            self._exchange(child, self._prepare)
            self._prepared = True

    def _exchange(self, child: Child, request: ComputeRequest[Answer]) -> Answer:
        self._send(child, request)
        assert child.stdout is not None
        while raw := read_frame(child.stdout):
            reply = msgspec.msgpack.decode(raw, type=Reply)
            if isinstance(reply, WorkerProgress):
                self.progress(reply.text)
                continue
            if isinstance(reply, Warned):
                self._warn(reply.text)
                continue
            for digest in reply.damaged:
                self._damaged.put(digest)
            if isinstance(reply, Raised):
                raise exception_of(reply, Path(self._begin.log) if self._begin else None)
            answer: Answer = msgspec.msgpack.decode(reply.value, type=request.answer)
            return answer
        raise _Died(self._note_death())

    def _send(self, child: Child, message: Struct) -> None:
        assert child.stdin is not None
        try:
            write_frame(child.stdin, message)
        except OSError:
            raise _Died(self._note_death()) from None

    # --- starts and ends ----------------------------------------------------------------------------------

    def _ready(self) -> Child:
        """Return the process; if it has died, start a new one after the backoff."""
        if self._child is None:
            self._closed.wait(max(0.0, self._start_at - time.monotonic()))
            self._start_again()
        if self._closed.is_set():
            raise LinkDown("FV1510", "the worker process was ended")
        assert self._child is not None
        return self._child

    def _start_again(self) -> None:
        if self._closed.is_set():
            return
        self._child = spawn()
        log.info("worker process", extra={"pid": self.pid})
        if self._died:
            self._warn("the worker process was started again")

    def _note_death(self) -> str:
        """Record the death; returns how the process ended, as text."""
        child, self._child = self._child, None
        assert child is not None
        try:
            code = child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                close(pipe)
        self._begun = self._prepared = False
        how = how_it_ended(code)
        self._start_at = time.monotonic() + (BACK_OFF_S * 2 ** (self._died - 1) if self._died else 0.0)
        self._died += 1
        if not self._closed.is_set():
            self._warn(f"the worker process ended with {how}; nothing is lost")
        return how

    def _warn(self, text: str) -> None:
        self._warnings.put(text)
        log.warning(text)

    def _out_of_attempts(self, how: str, request: ComputeRequest[Answer]) -> str:
        where = f"; its log: {self._begin.log}" if self._begin else ""
        return (
            f"the worker process ended {DEATHS} times during one request ({type(request).__name__}), the last time "
            f"with {how}{where}. With SIGKILL it was probably out of memory: see the system's log"
        )


def how_it_ended(code: int) -> str:
    """An exit status as text.

    >>> how_it_ended(-9), how_it_ended(3)
    ('signal 9 (SIGKILL)', 'exit code 3')
    """
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def drain(lines: "SimpleQueue[str]") -> list[str]:
    found: list[str] = []
    while True:
        try:
            found.append(lines.get_nowait())
        except Empty:
            return found


Incoming = Begin | AnyRequest
"""Messages that the process reads."""
