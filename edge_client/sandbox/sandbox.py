"""The device's side of the process that runs graphs: starts it, gives it work, watches and kills it."""

import io
import logging
import math
import os
import pickle
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

import numpy as np

from edge_client.health.memory import SharedMemory
from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.messages import (
    MAX_REPLY_BYTES,
    CompareRequest,
    ComparisonDone,
    Done,
    EvaluateRequest,
    EvaluationDone,
    Ready,
    Request,
    StepsDone,
    TrainingDone,
    TrainRequest,
    Unreadable,
    WorkFailed,
    decode_reply,
)
from edge_client.sandbox.pickles import RequestPickler
from edge_client.sandbox.shared import count_bytes, list_file_forms, list_forms, make_shared, map_shared
from edge_client.sandbox.worker import STOP, Limits
from edge_client.work.frozen_features import CutGraph, open_features
from edge_client.work.runtime import (
    Challenge,
    Compared,
    Evaluated,
    ModelTest,
    OutOfMemory,
    Seeds,
    Stopped,
    Trained,
    Watch,
)
from fedvit.data.folder import Files, Split
from fedvit.engine import CPU
from fedvit.errors import BadPayload, DataError, DeviceTrouble, FedvitError
from fedvit.program import LABELS, Program
from fedvit.tensors import Array, release_pages
from profiles.probes.host import resident_bytes

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
STOP_GRACE_S = 1.0
"""Time in which a step may end by itself after a stop; then the process is killed."""
START_S = 60.0
"""Longest wait for a new process: the first one imports the engine, which takes seconds on a board."""
BUNDLE_TEXT_BYTES = 4 << 20
"""More than a bundle's descriptions have, and the names of its tensors."""
BUNDLE_FILES = {"card.json", "labels.json", "preprocessing.json", "README.md", "model.onnx", "reference.json"}
"""Names of `export.bundle.write`, whose code this process does not load."""
STACK_BYTES = 8 << 20
"""Address space that a thread reserves for its stack."""


class GraphProcess:
    """A running process with its connection."""

    def __init__(self, connection: Connection, pid: int, limits: Limits) -> None:
        self.connection, self.pid, self.limits = connection, pid, limits
        self.images: dict[str, Files] = {}  # "train" and "test", as it knows them
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._inodes = find_inodes(limits.readable)

    def is_alive(self) -> bool:
        """Return False if it ended while it had no work."""
        with suppress(EOFError, OSError):
            while self.connection.poll(0):
                self.connection.recv_bytes(MAX_REPLY_BYTES)
            return True
        return False

    def can_read(self, folders: Iterable[Path]) -> bool:
        """Return True if it was allowed to read all of these folders."""
        readable = self.limits.readable
        if find_inodes(readable) != self._inodes:  # a right belongs to a folder, not to its name
            return False
        return all(not readable.isdisjoint((folder, *folder.parents)) for folder in folders)

    def note_unreadable(self, unreadable: Iterable[Unreadable]) -> None:
        """Note the images that it could not decode."""
        for one in unreadable:
            files = self.images.get(one.files)
            if files and one.row < len(files.paths):
                files.failed[files.paths[one.row]] = one.reason

    def kill(self) -> None:
        """Kill it, and return when it has ended."""
        with suppress(ProcessLookupError):
            if self._handle is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        with suppress(EOFError, OSError):
            while self.connection.poll(STOP_GRACE_S):
                self.connection.recv_bytes()
        self.connection.close()
        if self._handle is not None:
            os.close(self._handle)


class Sandbox:
    """Runs graphs as `Runtime` does, but in a process that is confined and can be killed.

    The process can read files below `readable`, which are those of graphs, weights and images. `memory_bytes` is the
    budget of the device, its own process included; None: no budget. Without `own_kernels` the optional kernels are not
    used, even if they are installed.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        threads: int,
        provider: str = CPU,
        readable: Iterable[Path],
        memory_bytes: int | None = None,
        own_kernels: bool = True,
    ) -> None:
        self._launcher = launcher
        self._threads, self._provider = threads, provider
        self._readable = frozenset(path.resolve() for path in readable)
        self._memory_bytes = memory_bytes
        self._own_kernels = own_kernels
        self._graphs: dict[str, Path] = {}
        self._cuts: dict[str, CutGraph] = {}
        self._process: GraphProcess | None = None
        self._warned = False
        self.memory = SharedMemory()

    # --- as Runtime -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Start the process if there is none. Raises DeviceTrouble."""
        self._find_process(frozenset())

    def open(self, digest: str, path: Path, cut: CutGraph | None = None) -> None:
        """Note a graph that the next task runs; the process loads it then."""
        self._graphs[digest] = path.resolve()
        self._cuts.pop(digest, None)
        if cut:
            self._cuts[digest] = cut

    def keep_only(self, digests: set[str]) -> None:
        """Forget graphs of finished programs."""
        self._graphs = {digest: path for digest, path in self._graphs.items() if digest in digests}
        self._cuts = {digest: cut for digest, cut in self._cuts.items() if digest in digests}

    def release(self) -> None:
        """End the process: all memory of graphs and images goes back to the system."""
        if self._process:
            self._process.kill()
            self.memory.remove()
            self._process = None

    def trim(self) -> None:
        """Do nothing: the process returns memory at the end of each request."""

    def train(
        self, program: Program, start: Mapping[str, Array], images: Split, seeds: Seeds, lr_scale: float, watch: Watch
    ) -> Trained:
        """Run all training phases. Raises Stopped, BadPayload, DataError, DeviceTrouble."""
        release_pages(start.values())  # this process read them to check them: they would count twice
        request = TrainRequest(program, self._graphs, dict(start), images, seeds, lr_scale, self._cuts)
        result = make_shared(count_bytes(list_forms(program, count_most_rows(program, len(images)))))
        try:
            done = self._work(request, {"train": images.files}, result, watch)
            if not isinstance(done, TrainingDone):
                raise BadPayload("FV1481", "the process that runs graphs answered a training with an evaluation")
            tensors = map_shared(result, list_forms(program, check_rows(program, done.collected)))
        finally:
            os.close(result)
        collected = {name: tensors.pop(name) for name in done.collected}
        return Trained(tensors, collected, done.samples, done.loss, done.steps, done.step_s, done.flops)

    def evaluate(self, test: ModelTest, watch: Watch) -> Evaluated:
        """Count right answers. Raises Stopped, BadPayload, DataError, DeviceTrouble."""
        release_pages(test.values.values())
        result = make_shared(0)
        try:
            done = self._work(EvaluateRequest(self._graphs, test), list_test_files(test), result, watch)
        finally:
            os.close(result)
        if not isinstance(done, EvaluationDone):
            raise BadPayload("FV1481", "the process that runs graphs answered an evaluation with a training")
        return Evaluated(done.correct, done.samples, done.flops, done.by_class, done.errors, done.labels)

    def compare(self, test: ModelTest, watch: Watch, challenge: Challenge) -> Compared:
        """Make a bundle of the model, and compare it with the one that the device uses.

        Raises Stopped, BadPayload, DataError, DeviceTrouble.
        """
        release_pages(test.values.values())
        result = make_shared(count_bundle_bytes(test.program, challenge.graph))
        try:
            done = self._work(CompareRequest(self._graphs, test, challenge), list_test_files(test), result, watch)
            if not isinstance(done, ComparisonDone) or not done.files.keys() <= BUNDLE_FILES:
                raise BadPayload("FV1481", "the process that runs graphs answered a comparison with something else")
            files = map_shared(result, list_file_forms(done.files))
        finally:
            os.close(result)
        contents = {name: content.tobytes() for name, content in files.items()}
        return Compared(done.comparison, done.with_champion, contents, done.flops)

    # --- the process ----------------------------------------------------------------------------------

    def _work(self, request: Request, images: dict[str, Files], result: int, watch: Watch) -> Done:
        """Let the process do a request. One that was killed is replaced once: the same seeds give the same result."""
        try:
            done = self._try(request, images, result, watch)
        except (EOFError, OSError):
            log.warning("the process that runs graphs ended during a task; it is started again")
            self.release()
            watch.tally.phases.clear()
            watch.tally.flops = 0
            try:
                done = self._try(request, images, result, watch)
            except (EOFError, OSError) as error:
                self.release()
                raise DeviceTrouble("FV1480", "the process that runs graphs ended twice during a task") from error
        if isinstance(done, WorkFailed):
            raise make_error(done)
        return done

    def _try(self, request: Request, images: dict[str, Files], result: int, watch: Watch) -> Done | WorkFailed:
        process = self._find_process(find_folders(images.values()))
        new = {name: files for name, files in images.items() if process.images.get(name) is not files}
        process.images |= new
        raw = io.BytesIO()
        known = {files: name for name, files in process.images.items()}
        RequestPickler(raw, known, lambda file: process.can_read([file.resolve()])).dump(request)
        files = [cut.file for cut in request.cuts.values()] if isinstance(request, TrainRequest) else []
        process.connection.send_bytes(pickle.dumps((new, files)))
        process.connection.send_bytes(raw.getbuffer())
        send_handle(process.connection, result, process.pid)
        for file in files:
            handle = open_features(file)
            try:
                send_handle(process.connection, handle, process.pid)
            finally:
                os.close(handle)
        try:
            done = self._wait(process, watch)
        except BadPayload:
            self.release()  # what it sends is not trusted any more
            raise
        process.note_unreadable(done.unreadable)
        return done

    def _wait(self, process: GraphProcess, watch: Watch) -> Done | WorkFailed:
        killed_at = math.inf
        while True:
            if killed_at == math.inf and watch.stopped():
                killed_at = time.monotonic() + STOP_GRACE_S
                process.connection.send_bytes(STOP)
            if process.connection.poll(LOOK_EVERY_S):
                reply = decode_reply(process.connection.recv_bytes(MAX_REPLY_BYTES))
                if isinstance(reply, StepsDone):
                    note_steps(watch, reply)
                elif isinstance(reply, Ready):
                    raise BadPayload("FV1481", "the process that runs graphs started twice")
                else:
                    return reply
            if time.monotonic() > killed_at:
                self.release()
                raise Stopped("FV1422", "the task was stopped")

    def _find_process(self, folders: Collection[Path]) -> GraphProcess:
        """Return the process: a new one if there is none, or if it may not read these folders."""
        if self._process and not (self._process.is_alive() and self._process.can_read(folders)):
            self.release()
        if self._process is None:
            self._process = self._start(self._readable.union(folders))
        return self._process

    def _start(self, readable: frozenset[Path]) -> GraphProcess:
        limits = Limits(
            self._threads, self._provider, readable, self._count_growth_bytes(), own_kernels=self._own_kernels
        )
        try:
            process = GraphProcess(*self._launcher.launch(), limits)
            process.connection.send_bytes(pickle.dumps(limits))
            if not process.connection.poll(START_S):
                process.kill()
                raise DeviceTrouble("FV1480", f"the process that runs graphs did not start within {START_S:.0f} s")
            ready = decode_reply(process.connection.recv_bytes(MAX_REPLY_BYTES))
        except (EOFError, OSError) as error:
            raise DeviceTrouble("FV1480", f"the process that runs graphs could not be started: {error}") from error
        if isinstance(ready, Ready) and ready.missing and not self._warned:
            self._warned = True
            log.warning("this system does not confine graphs fully", extra={"missing": ", ".join(ready.missing)})
        self.memory.add(process.pid)
        return process

    def _count_growth_bytes(self) -> int | None:
        if self._memory_bytes is None:
            return None
        stacks = (self._threads + 4) * STACK_BYTES
        return max(0, self._memory_bytes - resident_bytes()) + stacks


def make_error(failed: WorkFailed) -> FedvitError:
    """Return the error that ended the work of the process."""
    match failed.kind:
        case "stopped":
            return Stopped("FV1422", "the task was stopped")
        case "memory":
            return OutOfMemory("FV1425", failed.reason)
        case "data":
            return DataError(failed.code, failed.reason)
        case "payload":
            return BadPayload(failed.code, failed.reason)
        case "engine":
            return DeviceTrouble("FV1480", failed.reason)


def note_steps(watch: Watch, steps: StepsDone) -> None:
    """Add the steps of a report to the tally of the task, and pass the progress on."""
    tally = watch.tally
    tally.phases += [[] for _ in range(len(steps.seconds) - len(tally.phases))]
    for times, new in zip(tally.phases, steps.seconds, strict=False):
        times += new
    tally.flops = steps.flops
    watch.step(steps.done, steps.total, steps.loss)


def count_most_rows(program: Program, images: int) -> dict[str, int]:
    """Return the largest number of rows of each collected output: an image may be chosen in each epoch."""
    rows = {phase.collect.output: images * phase.epochs for phase in program.train if phase.collect}
    return {**rows, LABELS: max(rows.values())} if rows else {}


def count_bundle_bytes(program: Program, graph: Path) -> int:
    """Return the largest size of a bundle of the model: its tensors, what it gathers, the graph, and its texts."""
    tensors = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in program.tensors.values())
    gather = program.evaluate.gather
    gathered = gather.capacity * (4 * math.prod(gather.shape) + 16) if gather else 0
    return tensors + gathered + 2 * graph.stat().st_size + 4 * sum(map(len, program.classes)) + BUNDLE_TEXT_BYTES


def check_rows(program: Program, rows: dict[str, int]) -> dict[str, int]:
    """Raises BadPayload unless rows are named for what the Program collects, and for nothing else."""
    if rows.keys() != (expected := count_most_rows(program, 0)).keys():
        raise BadPayload("FV1481", f"the process that runs graphs sent {sorted(rows)}, expected {sorted(expected)}")
    return rows


def find_folders(images: Collection[Files]) -> frozenset[Path]:
    """Return the folders with the images, and those that links among them lead to."""
    paths = {path for files in images for path in files.paths}
    folders = {path.parent.resolve() for path in paths}
    return frozenset(folders | {path.resolve().parent for path in paths if path.is_symlink()})


def find_inodes(folders: Iterable[Path]) -> dict[Path, int | None]:
    """Return the inode of each folder; None if it is not here."""
    return {folder: folder.stat().st_ino if folder.exists() else None for folder in folders}


def list_test_files(test: ModelTest) -> dict[str, Files]:
    """Return the images of a test by the names that the process knows them by."""
    return {"train": test.data.train.files, "test": test.data.test.files}
