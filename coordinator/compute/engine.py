"""Answers the requests of a run's control side in this process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import msgspec

from coordinator.compute.accelerator import choose_accelerator, torch_devices
from coordinator.compute.checkpoint import load_state, start_state, write_models
from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.messages import (
    ComputeRequest,
    FindOutliers,
    Finish,
    Fold,
    Planned,
    PlannedTask,
    PlanTasks,
    Prepare,
    Prepared,
    RecallTasks,
    Step,
)
from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.compute.process import drain
from coordinator.compute.ranks import Ranks
from coordinator.compute.references import snapshot
from coordinator.compute.restore import newest_state
from coordinator.compute.server_step import ServerStep
from coordinator.config import RunConfig, make_config
from coordinator.record.record import Record
from coordinator.record.scores import BEST
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError, OverBudget
from fedvit.methods.base import ServerState

Answer = TypeVar("Answer")


class Engine:
    """One run's compute side; see `Compute`. It only reads the record."""

    def __init__(
        self, *, run: str, config: RunConfig, store: Record, folder: Path, graph_cache: Path | None = None
    ) -> None:
        self.progress: Callable[[str], None] = lambda text: None
        self._run = run
        self._own_config = self._config = config  # a run that only tests an earlier one takes that one's as _config
        self._store = store
        self._folder = folder
        self._graph_cache = graph_cache
        self._blobs = VerifiedBlobs(folder / "blobs")
        self._step: ServerStep | None = None
        self._ranks: Ranks | None = None
        self._warnings: SimpleQueue[str] = SimpleQueue()
        self.warn: Callable[[str], None] = self._warnings.put
        self._answers: dict[type, Callable[[Any], Any]] = {
            Prepare: self._prepare,
            PlanTasks: self._plan,
            RecallTasks: self._recall,
            FindOutliers: lambda request: self._server_step.outliers(request.round),
            Step: lambda request: self._server_step.take(request.round, request.saved, request.drawn),
            Fold: lambda request: self._server_step.fold(request.round, request.saved),
            Finish: self._finish,
        }

    def ask(self, request: ComputeRequest[Answer]) -> Answer:
        return cast(Answer, self._answers[type(request)](request))

    def damaged(self) -> list[str]:
        return self._blobs.found()

    def take_warnings(self) -> list[str]:
        return drain(self._warnings)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None

    @property
    def _server_step(self) -> ServerStep:
        assert self._step is not None, "a run is prepared before anything else is asked"
        return self._step

    def _prepare(self, request: Prepare) -> Prepared:
        # read all blobs again: an unchanged modification time does not prove that the disk still returns the same bytes
        self._blobs.forget_all_but()
        own = self._own_config
        tested = own.start_from if own.rounds == 0 else None
        state = self._read_start(own) if tested is not None else None
        record = self._store.runs.read(self._run)
        if tested is not None:  # its own Program
            record = self._store.runs.read(tested)
            began = make_config(record.config, f"run {tested}").run
            self._config = msgspec.structs.replace(began, accelerator=own.accelerator)
        plan = make_plan(
            self._config,
            request.classes,
            self._blobs,
            start=self._read_start(self._config),
            budgets=request.budgets,
            cache=self._graph_cache,
            progress=self._report_progress,
        )
        if state is not None:
            plan = replace(plan, state=replace(state, uploads={}))
        made = plan.first.digest
        if record.program not in (None, made):
            raise ConfigError(
                "FV1509",
                f"run {record.id} began with program {record.program}, but this software makes {made}: "
                "resume it with the versions it began with",
            )
        accelerator = choose_accelerator(self._config.accelerator)
        self._step = ServerStep(
            self._run, self._config, self._store, self._blobs, plan, torch_devices(accelerator)[0],
            self._start_ranks(plan, torch_devices(accelerator)), self._report_progress,
        )  # fmt: skip
        saved, remade = newest_state(self._step, request.copies)
        groups = {group: (role.value, len(names)) for group, (role, names) in plan.method.groups(plan.vit).items()}
        return Prepared(
            program=made, protocol=plan.protocol, groups=groups, accelerator=accelerator, saved=saved, remade=remade
        )

    def _read_start(self, config: RunConfig) -> ServerState | None:
        """Return the state of the earlier run that a run starts from; None if it starts from none."""
        if config.start_from is None:
            return None
        return start_state(config.start_from, self._store, self._folder.parent, config.start_round)

    def _start_ranks(self, plan: Plan, accelerators: tuple[str, ...]) -> Ranks | None:
        """Start several processes if the rule can divide its work among them."""
        self.close()
        if len(accelerators) > 1 and plan.rule.is_divided:
            self._ranks = Ranks(
                accelerators, plan.rule, plan.vit, self._blobs, self._report_progress, self._report_warning
            )
            self._ranks.start()
        return self._ranks

    def _report_progress(self, text: str) -> None:
        self.progress(text)

    def _report_warning(self, text: str) -> None:
        self.warn(text)

    def _plan(self, request: PlanTasks) -> Planned:
        too_small: dict[str, str] = {}
        tasks: dict[str, PlannedTask] = {}
        with self._blobs.commit_together() as batched_commit:
            state = _LazyState(partial(load_state, request.saved, self._blobs, self._server_step.plan.values))
            for device, target in request.targets.items():
                try:
                    tasks[device] = self._task(device, target, request, state, batched_commit)
                except OverBudget as error:
                    too_small[device] = str(error)
        return Planned(tasks=tasks, too_small=too_small)

    def _task(
        self, device: str, target: PlannedDevice | None, request: PlanTasks, state: "_LazyState", blobs: BlobStore
    ) -> PlannedTask:
        """A device's Program for the round, and the digests of the tensors that the server sends. Raises OverBudget."""
        plan, saved = self._server_step.plan, request.saved
        variant, expected = plan.choose_variant(device, request.round, target)
        groups = {
            group: plan.find_sent_blob(variant, group, saved.find_sent_digest(group))
            for group in variant.program.common_groups()
        }
        sent = [known for group, known in saved.references.items() if groups.get(group) == known.digest]
        for group in variant.program.own_groups():
            generated = plan.rule.generate(state.value, device, self._config.seed)
            members = {name: generated[name] for name in variant.program.names(group)}
            sent.append(snapshot(members, self._config.updates, blobs))
            groups[group] = sent[-1].digest
        return PlannedTask(
            program=variant.digest,
            groups=groups,
            expected=expected,
            delta_chain=tuple(delta for reference in sent for delta in reference.delta_chain(blobs)),
            lr_scale=variant.method.lr_scale(request.round, self._config.rounds),
        )

    def _recall(self, request: RecallTasks) -> list[PlannedTask]:
        plan, rounds = self._server_step.plan, self._config.rounds
        return [
            PlannedTask(
                program=task.program,
                groups=task.groups,
                expected=task.expected,
                lr_scale=plan.method_for(task.device, task.round).lr_scale(task.round, rounds),
            )
            for task in request.tasks
        ]

    def _finish(self, request: Finish) -> None:
        plan: Plan = self._server_step.plan
        devices = [entry.device for entry in self._store.devices.read_all(self._run) if entry.totals.results]
        for folder, saved in ((self._folder, request.saved), (self._folder / BEST, request.best)):
            if saved:
                state = load_state(saved, self._blobs, plan.values)
                write_models(folder, state, plan.rule, devices, self._config.seed)


class _LazyState:
    """A state that is read when it is first needed: most methods generate nothing per device."""

    def __init__(self, load: Callable[[], ServerState]) -> None:
        self._load = load
        self._value: ServerState | None = None

    @property
    def value(self) -> ServerState:
        if self._value is None:
            self._value = self._load()
        return self._value
