"""Where a device does a task once its blobs are here: what goes into the step, the step, and what comes of it."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_client.downlink import Route, make_blob
from edge_client.guard import Exceeded, Guard, Guarded
from edge_client.integrity import Integrity
from edge_client.private import clipped, noisy_rows
from edge_client.runtime import Runtime, Seeds, Stopped, Trained, Watch
from edge_client.uplink import coded_upload
from edge_client.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.engine import give_back, load_engine
from fedvit.errors import BadPayload
from fedvit.program import Program, Role
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors, check_finite, check_tensors, delta, mapped, packed_pieces
from fedvit.wire.messages import Cancel, Extended, Manifest, Progress, Result, ResultAck, Task

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""Between lines of the log on how far a task is."""


@dataclass
class Job:
    """A task on this device: first its blobs are fetched, then it runs."""

    task: Task
    expires_at: float  # on this process's monotonic clock; clocks of two machines are never compared
    given_s: float  # from the receipt of the task
    stop: threading.Event = field(default_factory=threading.Event)
    missing: set[str] = field(default_factory=set)
    routes: list[Route] = field(default_factory=list)  # to blobs that are made here
    fetched_bytes: int = 0
    fetched_anew: Counter[str] = field(default_factory=Counter)  # blobs that were damaged here -> how often
    working: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        return self.task.run, self.task.round, self.task.kind

    def is_meant(self, message: Extended | Cancel | ResultAck) -> bool:
        return self.key == (message.run, message.round, message.kind)


class Workbench:
    """One device's. `do` belongs into a thread of its own, and does one job at a time.

    `traffic()` gives the bytes that the device received and sent so far, `tell` passes on how far a job is.
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
        traffic: Callable[[], tuple[int, int]],
        tell: Callable[[Progress], None],
    ) -> None:
        self.takes_recipes = True  # until one gave another blob than it says
        self._device = device
        self._data = data
        self._vault = vault
        self._blobs = blobs
        self._integrity = integrity
        self._runtime = runtime
        self._guard = guard
        self._traffic = traffic
        self._tell = tell
        self._told_bytes = (0, 0)  # received, sent: already in some result
        self._by_classes: dict[tuple[str, ...], DeviceData] = {}

    def do(self, job: Job, program: Program) -> Result:
        """All that takes time.

        Raises Exceeded when a budget would not be kept, Stopped when the job was stopped, Damaged when blobs were, and
        must be fetched anew.
        """
        self._check(job, program)
        load_engine()
        with self._guard.watching(job.task.kind) as guarded:
            try:
                result = self._done(job, program, guarded)
                if self._guard.owns_process:
                    # a device that waits holds little, and the next task finds no holes between pieces of this one's
                    give_back()
                return result
            except Stopped:
                if job.stop.is_set() or not guarded.broke:
                    raise
            # here, because an exception on its way would hold what the task held
            broke, reason, use = guarded.broke[-1], guarded.reason(), self._use(job, guarded)
        if "memory" in use.broke:
            self._runtime.release()
            self._data.forget()
        raise Exceeded(reason, broke, use)

    def _done(self, job: Job, program: Program, guarded: Guarded) -> Result:
        task = job.task
        self._make_blobs(job)
        self._vault.note(task)
        data = self._labelled(program.classes)
        self._runtime.keep_only({graph.digest for graph in program.graphs.values()})
        for name in program.graphs_for(task.kind):
            digest = program.graphs[name].digest
            self._runtime.open(digest, self._blobs.path(digest))
        values = self._values(task, program)
        watch = Watch(self._progress(job), lambda: job.stop.is_set() or guarded.over(), guarded.tally)
        seeds = Seeds(task.seed, task.round, self._device)
        if task.kind == "evaluate":
            evaluated = self._runtime.evaluate(program, values, data, seeds, watch)
            use = self._use(job, guarded, evaluated.flops)
            correct = float(evaluated.correct)
            return self._result(task, evaluated.samples, {"correct": correct}, use)
        trained = self._runtime.train(program, values, data.train, seeds, task.lr_scale, watch)
        check_finite(trained.tensors, f"training diverged in round {task.round}, nothing of it is kept")
        kept = {
            name: trained.tensors.get(name, values[name])
            for group in dict.fromkeys([*program.with_role(Role.LOCAL), *program.evaluate.kept])
            for name in program.names(group)
        }
        owed = self._vault.owed(task.run)
        deltas, collected = self.brought(program, values, trained, seeds)
        upload, left = coded_upload(program, deltas, collected, owed.tensors)
        manifest = self._blobs.put(*packed_pieces(upload)) if upload else None
        if manifest:
            self._integrity.check([manifest.digest])  # here, and not in the loop that sends it
        guarded.upload_bytes = manifest.size if manifest else 0
        use = self._use(job, guarded)
        result = self._result(task, trained.samples, {"loss": trained.loss}, use, manifest)
        if job.stop.is_set() or "upload" in use.broke:  # what must not be sent is not kept either
            raise Stopped("the task was stopped")
        self._vault.commit(result, kept, left, owed)
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

    def _check(self, job: Job, program: Program) -> None:
        """What the task reads is as it was written: blobs by their digests, the vault by its sums. No part of the work
        that is measured, as fetching is none."""
        for mended in self._vault.mend(job.task.run):
            self._integrity.report(mended.what)
        making = [route for route in job.routes if not self._blobs.has(route.target.digest)]
        initial = [group.initial for group in program.groups.values() if group.initial]
        graphs = [graph.digest for graph in program.graphs.values()]
        self._integrity.check([*graphs, *job.task.groups.values(), *initial, *_needed(making)])

    def _make_blobs(self, job: Job) -> None:
        """What was not fetched whole. Raises BadPayload when a recipe does not give what it says."""
        try:
            for route in job.routes:
                if not self._blobs.has(route.target.digest):
                    make_blob(route, self._blobs)
        except BadPayload:
            self._integrity.check(_needed(job.routes), afresh=True)  # it may have become damaged since it was read
            self.takes_recipes = False  # from now on everything is fetched whole
            raise

    def brought(self, program: Program, values: Tensors, trained: Trained, seeds: Seeds) -> tuple[Tensors, Tensors]:
        """What the result is made of: deltas of the groups that are sent back, and what was collected."""
        back = {
            name: values[name]
            for group in program.with_role(*(role for role in Role if role.sent_back))
            for name in program.names(group)
        }
        moved = delta({name: trained.tensors.get(name, values[name]) for name in back}, back)
        if program.clip_delta is not None:
            moved = clipped(moved, program.clip_delta)
        collected = dict(trained.collected)
        for phase in program.train:
            if phase.collect:
                collected[phase.collect.output] = noisy_rows(collected[phase.collect.output], phase.collect, seeds)
        return moved, collected

    def _labelled(self, classes: tuple[str, ...]) -> DeviceData:
        """The images under the run's class list; kept, because decoded images are cached inside."""
        if classes not in self._by_classes:
            self._by_classes = {classes: self._data.relabelled(classes)}
        return self._by_classes[classes]

    def _values(self, task: Task, program: Program) -> Tensors:
        """Every tensor at the start of the round, checked against the Program."""
        values: Tensors = {}
        stored = self._vault.local(task.run)
        kept = program.evaluate.kept if task.kind == "evaluate" else ()
        if program.evaluate.kept_of_this_round and self._vault.round_of(task.run) != task.round:
            kept = ()
        for group, spec in program.groups.items():
            what = f"group {group!r} of round {task.round}"
            mine = stored if stored and (spec.role is Role.LOCAL or group in kept) else {}
            tensors = {name: mine[name] for name in program.names(group) if name in mine}
            if not tensors:  # also when the group was not this device's own in the rounds before
                digest = task.groups.get(group) if spec.role.from_server_each_round else spec.initial
                if digest is None:
                    source = (
                        "the task does not bring it" if spec.role.from_server_each_round else "it has no initial value"
                    )
                    raise BadPayload(f"{what}: {source}")
                tensors = mapped(self._blobs.path(digest))
            check_tensors(tensors, program.expected([group]), what)
            values |= tensors
        return values

    def _progress(self, job: Job) -> Callable[[int, int, float | None], None]:
        """Tells how far the job is: at its first and last step, and else not sooner than the task says after the
        message before."""
        last, logged = -math.inf, time.monotonic()

        def step(done: int, total: int, loss: float | None) -> None:
            nonlocal last, logged
            now = time.monotonic()
            task = job.task
            if now - logged >= LOG_EVERY_S:
                logged = now
                said = {} if loss is None else {"loss": f"{loss:.3f}"}
                log.info("task goes on", extra={"round": task.round, "steps": f"{done}/{total}", **said})
            if now - last >= task.progress_s or done == total:
                last = now
                self._tell(Progress(task.run, task.round, task.kind, done, total, loss, task.task))

        return step

    def _use(self, job: Job, guarded: Guarded, flops: int | None = None) -> ResourceUse:
        told = self._told_bytes
        self._told_bytes = self._traffic()
        received_bytes, sent_bytes = self._told_bytes[0] - told[0], self._told_bytes[1] - told[1]
        return msgspec.structs.replace(
            guarded.use(flops),
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
            fetched_bytes=job.fetched_bytes,
            upload_bytes=guarded.upload_bytes,
        )


def _needed(routes: list[Route]) -> list[str]:
    """Blobs from which others are made."""
    bases = [route.base for route in routes if route.base]
    return bases + [recipe.patch.digest for route in routes for recipe in route.recipes]
