"""Runs a task once its blobs are here: its inputs, its training or evaluation, and its result."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_client.delta_chains import DeltaChain, make_blob
from edge_client.disk import DiskBudget
from edge_client.evaluation import own_groups, start_values
from edge_client.guard import Exceeded, Guard, Guarded
from edge_client.integrity import Integrity
from edge_client.private import clipped, noisy_rows
from edge_client.runtime import Runtime, Seeds, Stopped, Trained, Watch
from edge_client.uplink import coded_upload
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.engine import load_engine, trim_memory
from fedvit.errors import BadPayload
from fedvit.program import Program, Role
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, check_finite, delta, pack_in_pieces
from fedvit.wire.messages import MAX_CLASS_COUNTS, Cancel, Extended, Manifest, Progress, Result, ResultAck, Task

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""Interval between log lines about the progress of a task."""


@dataclass
class TaskExecution:
    """A task on this device: first its blobs are fetched, then it runs."""

    task: Task
    expires_at: float  # on this process's monotonic clock; clocks of two machines are never compared
    given_s: float  # from the receipt of the task
    stop: threading.Event = field(default_factory=threading.Event)
    missing: set[str] = field(default_factory=set)
    delta_chains: list[DeltaChain] = field(default_factory=list)  # for blobs that this device rebuilds
    fetched_bytes: int = 0
    fetched_anew: Counter[str] = field(default_factory=Counter)  # blobs that were damaged here -> how often
    working: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task.run, self.task.round, self.task.kind

    def matches(self, message: Extended | Cancel | ResultAck) -> bool:
        return self.key == (message.run, message.round, message.kind)


class TaskExecutor:
    """Runs the tasks of one device, one at a time. `run` is called in a thread of its own.

    `traffic()` gives the bytes that the device received and sent so far, `report` publishes the progress of a task.
    """

    def __init__(
        self,
        *,
        device: str,
        data: DeviceData,
        vault: Vault,
        blobs: BlobStore,
        integrity: Integrity,
        runtime: Runtime,
        guard: Guard,
        disk: DiskBudget,
        traffic: Callable[[], tuple[int, int]],
        report: Callable[[Progress], None],
        counts_classes: bool,
    ) -> None:
        self.accepts_delta_chains = True  # until a rebuilt blob had another digest than promised
        self._device = device
        self._data = data
        self._vault = vault
        self._blobs = blobs
        self._integrity = integrity
        self._runtime = runtime
        self._guard = guard
        self._disk = disk
        self._traffic = traffic
        self._report = report
        self._counts_classes = counts_classes
        self._reported_bytes = (0, 0)  # (received, sent) that results have reported already
        self._by_classes: dict[tuple[str, ...], DeviceData] = {}

    def use(self, data: DeviceData) -> None:
        """Work with these images from the next task on."""
        self._data = data
        self._by_classes.clear()

    def run(self, execution: TaskExecution, program: Program) -> Result:
        """Do the work of a task, and return its result.

        Raises Exceeded for a budget, Stopped for a stopped task, DamagedBlobs for those that must be fetched again.
        """
        self._check(execution, program)
        load_engine()
        with self._guard.watching(execution.task.kind) as guarded:
            try:
                result = self._run_task(execution, program, guarded)
                if self._guard.owns_process:
                    # an idle device holds little memory, and the next task starts with an unfragmented heap
                    trim_memory()
                return result
            except Stopped:
                if execution.stop.is_set() or not guarded.broke:
                    raise
            # outside of the handler: the exception would keep the task's memory alive
            broke, reason, use = guarded.broke[-1], guarded.reason(), self._use(execution, guarded)
        if "memory" in use.broke:
            self._runtime.release()
            self._data.forget()
        raise Exceeded(reason, broke, use)

    def _run_task(self, execution: TaskExecution, program: Program, guarded: Guarded) -> Result:
        task = execution.task
        self._make_blobs(execution)
        self._vault.note(task)
        data = self._labelled(program.classes)
        data.check_fits(program.batch)
        self._runtime.keep_only({graph.digest for graph in program.graphs.values()})
        for name in program.graphs_for(task.kind):
            digest = program.graphs[name].digest
            self._runtime.open(digest, self._blobs.path(digest))
        evaluates = task.kind == "evaluate"
        own = own_groups(program, task, self._vault) if evaluates else program.with_role(Role.LOCAL)
        values, _ = start_values(program, task, own, self._vault, self._blobs)
        watch = Watch(self._progress(execution), lambda: execution.stop.is_set() or guarded.over(), guarded.tally)
        seeds = Seeds(task.seed, task.round, self._device)
        if evaluates:
            evaluated = self._runtime.evaluate(program, values, data, seeds, watch)
            use = self._use(execution, guarded, evaluated.flops)
            result = self._result(task, evaluated.samples, {"correct": evaluated.correct}, use)
            counts_classes = self._counts_classes and program.evaluate.counts_classes
            if not counts_classes or len(evaluated.by_class) > MAX_CLASS_COUNTS:
                return result
            return msgspec.structs.replace(result, by_class=evaluated.by_class)
        trained = self._runtime.train(program, values, data.train, seeds, task.lr_scale, watch)
        check_finite(trained.tensors, f"training diverged in round {task.round}, nothing of it is kept")
        kept = {
            name: trained.tensors.get(name, values[name])
            for group in dict.fromkeys([*program.with_role(Role.LOCAL), *program.evaluate.kept])
            for name in program.names(group)
        }
        residual = self._vault.residual(task.run)
        deltas, collected = self.outputs(program, values, trained, seeds)
        upload, new_residual = coded_upload(program, deltas, collected, residual.tensors)
        written = [*upload.values(), *kept.values(), *(new_residual or {}).values(), *residual.tensors.values()]
        written_bytes = sum(value.nbytes for value in written)
        self._disk.make_room(task.run, written_bytes - self._vault.count_replaced_bytes(task.run))
        manifest = self._blobs.put(*pack_in_pieces(upload)) if upload else None
        if manifest:
            self._integrity.check([manifest.digest])  # checked here, not in the event loop that sends it
        guarded.upload_bytes = manifest.size if manifest else 0
        use = self._use(execution, guarded)
        metrics = {"loss": trained.loss} if program.train else {}
        result = self._result(task, trained.samples, metrics, use, manifest)
        if execution.stop.is_set() or "upload" in use.broke:  # a result that must not be sent is not stored either
            raise Stopped("the task was stopped")
        self._vault.commit(result, kept, new_residual, residual)
        return result

    def _result(
        self, task: Task, samples: int, metrics: dict[str, float], use: ResourceUse, upload: Manifest | None = None
    ) -> Result:
        return Result(
            run=task.run,
            round=task.round,
            kind=task.kind,
            samples=samples,
            metrics=metrics,
            use=use,
            upload=upload,
            task=task.task,
            program=task.program,
        )

    def _check(self, execution: TaskExecution, program: Program) -> None:
        """Verify blobs by their digests, all of them anew in the first task of a run, and the vault by its checksums.

        Like fetching, this is not part of the measured work.
        """
        for repair in self._vault.repair(execution.task.run):
            self._integrity.report(repair.message)
        making = [chain for chain in execution.delta_chains if not self._blobs.has(chain.target.digest)]
        initial = [group.initial for group in program.groups.values() if group.initial]
        graphs = [graph.digest for graph in program.graphs.values()]
        self._integrity.begin(execution.task.run)
        self._integrity.check([*graphs, *execution.task.groups.values(), *initial, *_needed(making)])

    def _make_blobs(self, execution: TaskExecution) -> None:
        """Rebuild blobs that were not fetched whole. Raises BadPayload when a result has another digest."""
        try:
            for chain in execution.delta_chains:
                if not self._blobs.has(chain.target.digest):
                    make_blob(chain, self._blobs)
        except BadPayload:
            self._integrity.check(
                _needed(execution.delta_chains), afresh=True
            )  # a source may be damaged since it was verified
            self.accepts_delta_chains = False  # from now on everything is fetched whole
            raise

    def outputs(self, program: Program, values: Tensors, trained: Trained, seeds: Seeds) -> tuple[Tensors, Tensors]:
        """The contents of the result: deltas of the groups that are sent back, and collected values."""
        back = {
            name: values[name]
            for group in program.with_role(*(role for role in Role if role.is_sent_back))
            for name in program.names(group)
        }
        deltas = delta({name: trained.tensors.get(name, values[name]) for name in back}, back)
        if program.clip_delta is not None:
            deltas = clipped(deltas, program.clip_delta)
        collected = dict(trained.collected)
        for phase in program.train:
            if phase.collect:
                collected[phase.collect.output] = noisy_rows(collected[phase.collect.output], phase.collect, seeds)
        return deltas, collected

    def _labelled(self, classes: tuple[str, ...]) -> DeviceData:
        """The images with labels of the run's class list; kept, because they hold the cache of decoded images."""
        if classes not in self._by_classes:
            self._by_classes = {classes: self._data.relabel(classes)}
        return self._by_classes[classes]

    def _progress(self, execution: TaskExecution) -> Callable[[int, int, float | None], None]:
        """A function that reports progress: at the first and last step, and in between at the interval of the task."""
        last, logged = -math.inf, time.monotonic()

        def step(done: int, total: int, loss: float | None) -> None:
            nonlocal last, logged
            now = time.monotonic()
            task = execution.task
            if now - logged >= LOG_EVERY_S:
                logged = now
                fields = {} if loss is None else {"loss": f"{loss:.3f}"}
                log.info("task in progress", extra={"round": task.round, "steps": f"{done}/{total}", **fields})
            if now - last >= task.progress_s or done == total:
                last = now
                self._report(Progress(task.run, task.round, task.kind, done, total, loss, task.task))

        return step

    def _use(self, execution: TaskExecution, guarded: Guarded, flops: int | None = None) -> ResourceUse:
        before = self._reported_bytes
        self._reported_bytes = self._traffic()
        received_bytes, sent_bytes = self._reported_bytes[0] - before[0], self._reported_bytes[1] - before[1]
        return msgspec.structs.replace(
            guarded.use(flops),
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            fetched_bytes=execution.fetched_bytes,
            upload_bytes=guarded.upload_bytes,
        )


def _needed(delta_chains: list[DeltaChain]) -> list[str]:
    """Digests of the blobs that delta chains read."""
    bases = [chain.base for chain in delta_chains if chain.base]
    return bases + [step.patch.digest for chain in delta_chains for step in chain.steps]
