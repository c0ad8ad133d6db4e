"""Runs a task once its blobs are here: its inputs, its training or evaluation, and its result."""

import logging
import math
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from edge_client.health.guard import Exceeded, Guard, Guarded
from edge_client.link.device_link import DeviceLink
from edge_client.storage.best_round import keep_best
from edge_client.storage.delta_chains import DeltaChain, make_blob
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.evaluation import check_takes_part, newest_counted, own_groups, start_values
from edge_client.storage.models import DeviceModel
from edge_client.storage.repair import repair_run
from edge_client.trust.review import review_task
from edge_client.work.answer_tally import list_metrics
from edge_client.work.cutting import cut_graphs
from edge_client.work.private import clip_update, noisy_rows
from edge_client.work.runtime import (
    Challenge,
    GraphRunner,
    ModelSource,
    ModelTest,
    OutOfMemory,
    Seeds,
    Stopped,
    Trained,
    Watch,
)
from edge_client.work.uplink import encode_upload
from fedvit.comparison import as_metrics
from fedvit.data.folder import DeviceData
from fedvit.errors import BadPayload
from fedvit.logs import log_fields
from fedvit.policy import Policy, describe_policy
from fedvit.program import Program, Role
from fedvit.resources import ResourceUse
from fedvit.secure.layout import make_evaluation_payload, make_training_payload
from fedvit.task_names import TaskName, describe_attempt
from fedvit.tensors import Tensors, check_finite, delta, pack_in_pieces, total_bytes
from fedvit.wire.messages import MAX_CLASS_COUNTS, Cancel, Extended, Manifest, Progress, Result, ResultAck, Task
from profiles.probes.host import usable_cores

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""Interval between log lines about the progress of a task."""


class BackgroundWork(Protocol):
    """Work that runs in another thread."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the work has ended."""


def start_thread(work: Callable[[], None], name: str) -> BackgroundWork:
    """Start the work at once, for a process that is one device."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


@dataclass
class TaskExecution:
    """A task on this device: first its blobs are fetched, then it runs."""

    task: Task
    expires_at: float  # on this process's monotonic clock; clocks of two machines are never compared
    allowed_s: float  # from the receipt of the task
    received_at: float = field(default_factory=time.monotonic)
    fetch_s: float | None = None  # from the receipt until all blobs were here; None: they are not
    stop: threading.Event = field(default_factory=threading.Event)
    missing: set[str] = field(default_factory=set)
    delta_chains: list[DeltaChain] = field(default_factory=list)  # for blobs that this device rebuilds
    fetched_bytes: int = 0
    lacking: dict[str, int] = field(default_factory=dict)  # described blobs that are not this device's -> bytes
    fetched_anew: Counter[str] = field(default_factory=Counter)  # blobs that were damaged here -> how often
    working: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task.run, self.task.round, self.task.kind

    def matches(self, message: Task | Extended | Cancel | ResultAck) -> bool:
        return self.key == (message.run, message.round, message.kind)


class Worked(NamedTuple):
    """The event that a task's work ended, with a result or an error."""

    execution: TaskExecution
    result: Result | None
    error: Exception | None


class TaskExecutor:
    """Runs the tasks of one device, one at a time. `begin` starts their work in a thread."""

    def __init__(
        self,
        link: DeviceLink,
        storage: DeviceStorage,
        runtime: GraphRunner,
        guard: Guard,
        policy: Policy,
        *,
        begin: Callable[[Callable[[], None], str], BackgroundWork] = start_thread,
    ) -> None:
        self.accepts_delta_chains = True  # until a rebuilt blob had another digest than promised
        self.progress: Progress | None = None  # the newest that was reported
        self.link = link
        self.storage = storage
        self.guard = guard
        self._runtime = runtime
        self._counts_classes = policy.send.class_counts
        self._policy = next(describe_policy(policy))
        self._least_mask = policy.send.least_mask
        self.begin_work = begin
        self._work: BackgroundWork | None = None
        self._reported_bytes = (0, 0)  # (received, sent) that results have reported already
        self._relabelled: tuple[DeviceData, tuple[str, ...], DeviceData] | None = None

    def start(self, execution: TaskExecution, program: Program) -> None:
        """Begin the work of a task in a thread, which puts `Worked` into the device's inbox at its end."""
        execution.working = True
        execution.fetch_s = time.monotonic() - execution.received_at
        task, device = execution.task, self.link.identity.device
        of_task = TaskName.of(task, device).fields()
        log.info("blobs fetched", extra={**describe_attempt(task), "bytes": execution.fetched_bytes})
        before, inbox = self._work, self.link.transport.inbox

        def work() -> None:
            with log_fields(lambda: of_task):
                if before:
                    before.join()  # a cancelled task ends at its next step
                try:
                    if execution.stop.is_set():
                        raise Stopped("FV1422", "the task was stopped before it began")
                    result = self.storage.ledger.note_result(self.run(execution, program), program)
                    inbox.put(Worked(execution, result, None))
                except Exception as error:  # noqa: BLE001 - reported to the coordinator
                    inbox.put(Worked(execution, None, error))

        self._work = self.begin_work(work, f"task-{execution.task.kind}-{execution.task.round}")

    def join(self, timeout_s: float) -> None:
        """Wait until no task is running."""
        if self._work:
            self._work.join(timeout=timeout_s)

    def run(self, execution: TaskExecution, program: Program) -> Result:
        """Do the work of a task, and return its result.

        Raises OverBudget for a budget, Stopped for a stopped task, DamagedBlobs for those that must be fetched again,
        NotAllowed for a task that would send more than the device allows.
        """
        self.check_files(execution, program)
        check_takes_part(self.storage.vault, execution.task, program)
        self.storage.disk.make_place(execution.task.vault_run)
        review_task(execution.task, program, self.storage, min_mask=self._least_mask)
        self._runtime.load()
        with self.guard.watching(execution.task.kind) as guarded:
            try:
                result = self._run_task(execution, program, guarded)
                if self.guard.owns_process:
                    # an idle device holds little memory, and the next task starts with an unfragmented heap
                    self._runtime.trim()
                return result
            except OutOfMemory:
                guarded.refuse_memory()
            except Stopped:
                if execution.stop.is_set() or not guarded.broke:
                    raise
            # outside of the handler: the exception would keep the task's memory alive
            broke, reason, use = guarded.broke[-1], guarded.reason(), self.measure_use(execution, guarded)
        if "memory" in use.broke:
            self._runtime.release()
            self.storage.data.forget()
        raise Exceeded(reason, broke, use)

    def _run_task(self, execution: TaskExecution, program: Program, guarded: Guarded) -> Result:
        task, storage = execution.task, self.storage
        self.rebuild_blobs(execution)
        if not task.personal_of:
            keep_best(storage.vault, task.run, task.best)
            if task.kind != "compare":  # its round may be an earlier one
                storage.vault.notes.write(task)
        data = self._relabel(program.classes).fit_to(program.batch)
        if program.batch.labels and task.kind == "compare":
            raise BadPayload("FV2490", f"models of task {program.batch.labels.task} are not compared by right answers")
        self._runtime.keep_only({graph.digest for graph in program.graphs.values()})
        cuts = cut_graphs(program, storage, len(data.train)) if task.kind == "train" else {}
        for name in program.graphs_for(task.kind):
            digest = program.graphs[name].digest
            self._runtime.open(digest, storage.blobs.path(digest), cuts.get(digest))
        trains, upto = task.kind == "train", newest_counted(task)
        own = program.with_role(Role.LOCAL) if trains else own_groups(program, task, storage.vault, upto)
        values, personal = start_values(program, task, own, storage.vault, storage.blobs, upto)
        report = self.make_reporter(task, hides_loss=program.secure)
        watch = Watch(report, lambda: execution.stop.is_set() or guarded.over(), guarded.tally)
        seeds = Seeds(task.seed, task.round, self.link.identity.device)
        test = ModelTest(program, values, data, seeds)
        if task.kind == "compare":
            return self._compare(execution, test, personal, watch, guarded)
        if task.kind == "evaluate":
            evaluated = self._runtime.evaluate(test, watch)
            use = self.measure_use(execution, guarded, evaluated.flops)
            counts_classes = self._counts_classes and program.evaluate.counts_classes
            if program.secure:
                counts = [(count.label, count.images, count.correct) for count in evaluated.by_class]
                payload = make_evaluation_payload(
                    program, evaluated.samples, int(evaluated.correct), counts if counts_classes else None
                )
                storage.sums.keep_payload(task.run, task.round, task.kind, payload)
                return self.make_result(task, 0, {}, use)
            metrics = list_metrics(evaluated.correct, evaluated.errors, evaluated.labels, counts_classes=counts_classes)
            result = self.make_result(task, evaluated.samples, metrics, use)
            if not counts_classes or len(evaluated.by_class) > MAX_CLASS_COUNTS:
                return result
            return msgspec.structs.replace(result, by_class=evaluated.by_class)
        trained = self._runtime.train(program, values, data.train, seeds, task.lr_scale, watch)
        check_finite(trained.tensors, f"training diverged in round {task.round}, nothing of it is kept")
        local = {
            name: trained.tensors.get(name, values[name])
            for group in dict.fromkeys([*program.with_role(Role.LOCAL), *program.evaluate.kept])
            for name in program.names(group)
        }
        deltas, collected = self.outputs(program, values, trained, seeds)
        metrics = {"loss": trained.loss} if program.train else {}
        upload = Upload(deltas, collected, local, trained.samples, metrics)
        return self.commit(execution, program, upload, guarded)

    def _compare(
        self, execution: TaskExecution, test: ModelTest, personal: int, watch: Watch, guarded: Guarded
    ) -> Result:
        """Make a challenger of the model, and compare it with the champion on the device's own test images."""
        task, storage, program = execution.task, self.storage, test.program
        champion = storage.models.read().find("champion")
        challenge = Challenge(
            ModelSource(task.run, task.round, self.link.identity.device, personal),
            graph=storage.blobs.path(program.graphs[program.evaluate.graph].digest),
            champion=storage.models.path(champion.name) if champion else None,
            machine=platform.machine(),
            cores=usable_cores(),
            policy=self._policy,
        )
        compared = self._runtime.compare(test, watch, challenge)
        storage.disk.make_room(task.run, lambda: sum(map(len, compared.files.values())))
        use = self.measure_use(execution, guarded, compared.flops)
        if execution.stop.is_set():
            raise Stopped("FV1422", "the task was stopped")
        compared_on = compared.comparison
        challenger = DeviceModel(
            run=task.run,
            round=task.round,
            method=program.method,
            state="challenger",
            changed_s=time.time(),
            comparison=compared_on if compared.with_champion else None,
        )
        storage.models.add_files(challenger, compared.files)
        metrics = as_metrics(compared_on, with_champion=compared.with_champion)
        return self.make_result(task, compared_on.images, metrics, use)

    def commit(
        self,
        execution: TaskExecution,
        program: Program,
        upload: "Upload",
        guarded: Guarded,
        *,
        flops: int | None = None,
    ) -> Result:
        """Store a training's result in the vault, and return it. Raises Stopped for one that must not be sent."""
        task, storage = execution.task, self.storage
        if program.secure:
            return self._commit_for_sum(execution, program, upload, guarded, flops=flops)
        residual = storage.vault.residual(task.run)
        tensors, new_residual = encode_upload(program, upload.deltas, upload.collected, residual.tensors)
        self._make_room(task, tensors, upload.local, new_residual, residual.tensors)
        manifest = storage.blobs.put(*pack_in_pieces(tensors)) if tensors else None
        if manifest:
            storage.integrity.check([manifest.digest])  # checked here, not in the event loop that sends it
        guarded.upload_bytes = manifest.size if manifest else 0
        use = self.measure_use(execution, guarded, flops)
        result = self.make_result(task, upload.samples, upload.metrics, use, manifest)
        if execution.stop.is_set() or "upload" in use.broke:  # a result that must not be sent is not stored either
            raise Stopped("FV1422", "the task was stopped")
        storage.vault.commit(result, upload.local, new_residual, residual, best=task.best)
        return result

    def _commit_for_sum(
        self, execution: TaskExecution, program: Program, upload: "Upload", guarded: Guarded, *, flops: int | None
    ) -> Result:
        """Store a training whose update is added up in secret: its result has no number of the device."""
        task, storage = execution.task, self.storage
        loss = upload.metrics.get("loss", 0.0)
        payload = make_training_payload(upload.deltas, upload.samples, loss, measures_largest=program.is_sum_coded)
        self._make_room(task, payload, upload.local)
        result = self.make_result(task, 0, {}, self.measure_use(execution, guarded, flops))
        if execution.stop.is_set():
            raise Stopped("FV1422", "the task was stopped")
        storage.sums.keep_payload(task.run, task.round, task.kind, payload)
        storage.vault.commit(result, upload.local, best=task.best)
        return result

    def _make_room(self, task: Task, *written: Tensors) -> None:
        vault = self.storage.vault
        self.storage.disk.make_room(
            task.run, lambda: sum(map(total_bytes, written)) - vault.count_replaced_bytes(task.run, task.best)
        )

    def make_result(
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
            attempt=task.attempt,
        )

    def check_files(self, execution: TaskExecution, program: Program) -> None:
        """Verify blobs by their digests, all of them anew in the first task of a run, and the vault by its checksums.

        Like fetching, this is not part of the measured work.
        """
        integrity, blobs = self.storage.integrity, self.storage.blobs
        for repair in repair_run(self.storage.vault, execution.task.vault_run):
            integrity.report(repair.message)
        chains = [chain for chain in execution.delta_chains if not blobs.has(chain.target.digest)]
        initial = [group.initial for group in program.groups.values() if group.initial]
        graphs = [graph.digest for graph in program.graphs.values()]
        integrity.begin(execution.task.run)
        integrity.check([*graphs, *execution.task.groups.values(), *initial, *list_sources(chains)])

    def rebuild_blobs(self, execution: TaskExecution) -> None:
        """Rebuild blobs that were not fetched whole. Raises BadPayload when a result has another digest."""
        try:
            for chain in execution.delta_chains:
                if not self.storage.blobs.has(chain.target.digest):
                    make_blob(chain, self.storage.blobs)
        except BadPayload:
            # a source may be damaged since it was verified
            self.storage.integrity.check(list_sources(execution.delta_chains), afresh=True)
            self.accepts_delta_chains = False  # from now on everything is fetched whole
            raise

    def outputs(self, program: Program, values: Tensors, trained: Trained, seeds: Seeds) -> tuple[Tensors, Tensors]:
        """Return the contents of the result: deltas of the groups that are sent back, and collected values."""
        back = {
            name: values[name]
            for group in program.with_role(*(role for role in Role if role.is_sent_back))
            for name in program.names(group)
        }
        deltas = delta({name: trained.tensors.get(name, values[name]) for name in back}, back)
        if program.clip_delta is not None:
            deltas = clip_update(deltas, program.clip_delta)
        collected = dict(trained.collected)
        for phase in program.train:
            if phase.collect:
                collected[phase.collect.output] = noisy_rows(collected[phase.collect.output], phase.collect, seeds)
        return deltas, collected

    def _relabel(self, classes: tuple[str, ...]) -> DeviceData:
        """Return the images with labels of the run's class list. They are stored, as they hold decoded images."""
        data = self.storage.data
        if self._relabelled is None or self._relabelled[0] is not data or self._relabelled[1] != classes:
            self._relabelled = data, classes, data.relabel(classes)
        return self._relabelled[2]

    def make_reporter(self, task: Task, *, hides_loss: bool = False) -> Callable[[int, int, float | None], None]:
        """Return a function that reports progress: at the first and last step, and at the interval of the task.

        `hides_loss`: the coordinator, which may get the log, too, learns only the sum of the devices' losses.
        """
        last, logged = -math.inf, time.monotonic()

        def report(done: int, total: int, loss: float | None) -> None:
            nonlocal last, logged
            loss = None if hides_loss else loss
            now = time.monotonic()
            if now - logged >= LOG_EVERY_S:
                logged = now
                fields = {} if loss is None else {"loss": f"{loss:.3f}"}
                log.info("task in progress", extra={**describe_attempt(task), "steps": f"{done}/{total}", **fields})
            if now - last >= task.progress_s or done == total:
                last = now
                self.progress = Progress(task.run, task.round, task.kind, done, total, loss, task.task)
                self.link.report(self.progress)

        return report

    def measure_use(self, execution: TaskExecution, guarded: Guarded, flops: int | None = None) -> ResourceUse:
        """Return the cost of a task so far, with the bytes since the last result."""
        before = self._reported_bytes
        self._reported_bytes = self.link.traffic_bytes()
        received_bytes, sent_bytes = self._reported_bytes[0] - before[0], self._reported_bytes[1] - before[1]
        return msgspec.structs.replace(
            guarded.use(flops),
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            fetched_bytes=execution.fetched_bytes,
            upload_bytes=guarded.upload_bytes,
            fetch_s=execution.fetch_s,
        )


class Upload(NamedTuple):
    """The outcome of a training that is committed: what is sent, and the personal tensors."""

    deltas: Tensors
    collected: Tensors
    local: Tensors
    samples: int
    metrics: dict[str, float]


def list_sources(delta_chains: list[DeltaChain]) -> list[str]:
    """Return the digests of the blobs that delta chains read."""
    bases = [chain.base for chain in delta_chains if chain.base]
    return bases + [step.patch.digest for chain in delta_chains for step in chain.steps]
