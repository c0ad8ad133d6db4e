"""The process that runs graphs: takes requests from the device, and answers with their outcome.

It is forked before the device reads a key, and gives up its rights before the first graph arrives.
"""

import io
import math
import os
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

import msgspec
import numpy as np

from edge_client.sandbox.confine import confine
from edge_client.sandbox.messages import (
    CompareRequest,
    ComparisonDone,
    ErrorKind,
    EvaluateRequest,
    EvaluationDone,
    Ready,
    Reply,
    Request,
    StepsDone,
    TrainingDone,
    TrainRequest,
    Unreadable,
    WorkFailed,
)
from edge_client.sandbox.pickles import RequestUnpickler
from edge_client.sandbox.shared import count_bytes, list_file_forms, list_forms, write_tensors
from edge_client.work.runtime import Runtime, Stopped, Watch
from fedvit.data.folder import Files
from fedvit.engine import CPU, load_engine, trim_memory
from fedvit.errors import BadPayload, DataError
from fedvit.tensors import Tensors

REPORT_EVERY_S = 0.02
STOP = b"stop"
_REASON_CHARACTERS = 2000
_MOST_UNREADABLE = 10_000
_ACCELERATOR_FILES = tuple(map(Path, ("/dev", "/proc", "/sys", "/run", "/tmp")))


@dataclass(frozen=True)
class Limits:
    """The rights that the process keeps, and the settings of its engine."""

    threads: int
    provider: str
    readable: frozenset[Path]  # folders and files
    growth_bytes: int | None  # memory that it may allocate; None: any
    own_kernels: bool = True  # where they are installed


def serve_requests(connection: Connection) -> None:
    """Give up all rights but those that the first message leaves, then work until the connection ends."""
    limits: Limits = pickle.loads(connection.recv_bytes())  # noqa: S301 - the device wrote it
    load_engine()
    on_cpu = limits.provider == CPU
    missing = confine(
        [*limits.readable, *list_libraries()],
        () if on_cpu else _ACCELERATOR_FILES,
        limits.growth_bytes if on_cpu else None,  # an accelerator's driver reserves more than it uses
    )
    worker = _GraphWorker(connection, limits)
    trim_memory()  # the pages of the libraries are there before the device looks at its memory
    worker.send(Ready(missing))
    worker.serve()


def list_libraries() -> list[Path]:
    """Return the files and folders that Python and the engine read while they work."""
    system = ("/usr/lib", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/proc/self", "/proc/cpuinfo",
              "/proc/meminfo", "/sys/devices/system", "/dev/null", "/dev/urandom")  # fmt: skip
    return [*map(Path, system), Path(sys.prefix), Path(sys.base_prefix), *(Path(place) for place in sys.path if place)]


class _GraphWorker:
    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._runtime = Runtime(limits.threads, limits.provider, limits.own_kernels)
        self._runtime.open_features = lambda file: os.dup(self._features[file])
        self._features: dict[Path, int] = {}  # handles of files that this process may not open
        self._images = _KnownImages()

    def serve(self) -> None:
        while True:
            try:
                raw = self._connection.recv_bytes()
            except EOFError:
                return
            if raw != STOP:  # it came after the end of the request that it was for
                self._work(raw)

    def send(self, reply: Reply) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(reply))

    def _work(self, raw: bytes) -> None:
        new, files = pickle.loads(raw)  # noqa: S301 - the device wrote it
        self._images.add(new)
        raw = self._connection.recv_bytes()
        result = recv_handle(self._connection)
        self._features = {file: recv_handle(self._connection) for file in files}
        try:
            reply = self._try(raw, result)
        finally:
            for handle in (result, *self._features.values()):
                os.close(handle)
        trim_memory()
        self.send(reply)

    def _try(self, raw: bytes, result: int) -> Reply:
        kind: ErrorKind
        try:
            request: Request = RequestUnpickler(io.BytesIO(raw), self._images.files).load()
            return self._run(request, result)
        except Stopped as error:
            kind, code, reason = "stopped", error.code, str(error)
        except DataError as error:
            kind, code, reason = "data", error.code, str(error)
        except BadPayload as error:
            kind, code, reason = "memory" if is_out_of_memory(error) else "payload", error.code, str(error)
        except Exception as error:  # noqa: BLE001 - reported to the coordinator
            kind, code, reason = (
                "memory" if is_out_of_memory(error) else "engine",
                "",
                f"{type(error).__name__}: {error}",
            )
        return WorkFailed(kind, code, reason[:_REASON_CHARACTERS], self._images.list_unreadable())

    def _run(self, request: Request, result: int) -> Reply:
        runtime = self._runtime
        runtime.keep_only(set(request.graphs))
        cuts = request.cuts if isinstance(request, TrainRequest) else {}
        for digest, path in request.graphs.items():
            runtime.open(digest, path, cuts.get(digest))
        report = _Report(self)
        if isinstance(request, EvaluateRequest):
            evaluated = runtime.evaluate(request.test, report.watch)
            report.flush()
            return EvaluationDone(
                evaluated.correct,
                evaluated.samples,
                evaluated.flops,
                evaluated.by_class,
                self._images.list_unreadable(),
                evaluated.errors,
                evaluated.labels,
            )
        if isinstance(request, CompareRequest):
            compared = runtime.compare(request.test, report.watch, request.challenge)
            report.flush()
            sizes = {name: len(content) for name, content in compared.files.items()}
            files: Tensors = {name: np.frombuffer(content, np.uint8) for name, content in compared.files.items()}
            forms = list_file_forms(sizes)
            if count_bytes(forms) > os.fstat(result).st_size:
                raise BadPayload("FV1481", f"a bundle of {sum(sizes.values())} bytes is larger than expected")
            write_tensors(result, forms, files)
            return ComparisonDone(
                compared.comparison, compared.with_champion, sizes, compared.flops, self._images.list_unreadable()
            )
        program = request.program
        trained = runtime.train(program, request.values, request.images, request.seeds, request.lr_scale, report.watch)
        report.flush()
        tensors = {**trained.tensors, **trained.collected}
        rows = {name: len(values) for name, values in trained.collected.items()}
        write_tensors(result, list_forms(program, rows), tensors)
        return TrainingDone(
            trained.samples,
            rows,
            trained.loss,
            trained.steps,
            trained.step_s,
            trained.flops,
            self._images.list_unreadable(),
        )

    def is_stopped(self) -> bool:
        """Return True if the device has asked to stop, or has gone."""
        try:
            return self._connection.poll(0) and self._connection.recv_bytes() == STOP
        except EOFError:
            return True


def is_out_of_memory(error: Exception) -> bool:
    """Return True if an allocation was refused; onnxruntime says so in words alone."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("bad_alloc", "bad allocation", "Failed to allocate memory")
    )


class _Report:
    """Sends the steps of a request to the device, several at a time."""

    def __init__(self, worker: _GraphWorker) -> None:
        self.watch = Watch(self._note, self._stop)
        self._worker = worker
        self._sent_at = -math.inf
        self._sent: list[int] = []  # steps of each phase that were sent
        self._newest: tuple[int, int, float | None] | None = None
        self._stopped = False

    def _stop(self) -> bool:
        self._stopped = self._stopped or self._worker.is_stopped()
        return self._stopped

    def _note(self, done: int, total: int, loss: float | None) -> None:
        self._newest = done, total, loss
        if (now := time.monotonic()) - self._sent_at >= REPORT_EVERY_S:
            self._sent_at = now
            self.flush()

    def flush(self) -> None:
        """Send the steps since the last report."""
        if self._newest is None:
            return
        phases = self.watch.tally.phases
        self._sent += [0] * (len(phases) - len(self._sent))
        new = tuple(tuple(times[sent:]) for times, sent in zip(phases, self._sent, strict=True))
        self._sent = [len(times) for times in phases]
        self._worker.send(StepsDone(*self._newest, self.watch.tally.flops, new))
        self._newest = None


@dataclass
class _KnownImages:
    """The images that the device has named, with what was decoded of them."""

    files: dict[str, Files] = field(default_factory=dict)
    _stamps: dict[Path, tuple[int, int] | None] = field(default_factory=dict)
    _reported: dict[str, int] = field(default_factory=dict)  # failures of each that the device knows

    def add(self, new: Mapping[str, Files]) -> None:
        """Replace images; pictures of files that are the same since stay decoded."""
        for name, files in new.items():
            stamps = {path: _stamp(path) for path in files.paths}
            if before := self.files.get(name):
                # which of them failed, and whose mask did, the device has just said
                same = {path for path, now in stamps.items() if now and now == self._stamps.get(path)}
                files.take_pictures(before, same)
            self.files[name], self._reported[name] = files, len(files.failed)
            self._stamps |= stamps

    def list_unreadable(self) -> tuple[Unreadable, ...]:
        """Return the images that could not be decoded since the last call."""
        found = []
        for name, files in self.files.items():
            failed = list(files.failed.items())[self._reported[name] :]
            self._reported[name] += len(failed)
            rows = {path: row for row, path in enumerate(files.paths)} if failed else {}
            found += [Unreadable(name, rows[path], reason[:_REASON_CHARACTERS]) for path, reason in failed]
        return tuple(found[:_MOST_UNREADABLE])


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
