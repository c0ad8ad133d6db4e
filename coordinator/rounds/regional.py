"""A region: a run whose rounds are the tasks of a central coordinator, its centre.

The region trains and tests with its devices as any run does. Then it sends its centre one answer: the weighted mean of
the updates, or the sums of the evaluations. `fleet.region` has the link to the centre, where the region is a device.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple, Protocol

from coordinator.compute.messages import Fold, NextState, PlannedTask, PlanTasks
from coordinator.config import CENTRE
from coordinator.record.rounds import RoundWork
from coordinator.record.tables import SUM, ResultRecord, SavedState
from coordinator.rounds.engine import RoundEngine
from coordinator.rounds.leading import strike_outliers
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.parts import RunParts
from fedvit.errors import ConfigError, EmptyCohort, FedvitError
from fedvit.program import Program
from fedvit.quantities import format_count
from fedvit.wire.messages import ClassCount, TaskKind

log = logging.getLogger(__name__)


class RegionCounts(NamedTuple):
    """Announcement of a region: the sums of its devices' numbers of images."""

    classes: tuple[str, ...]
    train_samples: int
    test_samples: int


class RegionAnswer(NamedTuple):
    """The answer of all devices of a region to a task of its centre."""

    samples: int
    metrics: dict[str, float]
    counts: RegionCounts
    flops: int | None  # of all devices together
    update: Path | None = None  # of a training: the file with the mean of each tensor's deltas
    by_class: tuple[ClassCount, ...] = ()  # of an evaluation


@dataclass(eq=False)
class CentralTask:
    """A task of the centre. Its `outcome` is a RegionAnswer, or the error that the centre reads as the reason; the link
    cancels it if the centre does not wait any longer."""

    kind: TaskKind
    round: int
    seed: int
    lr_scale: float
    program: Program
    groups: dict[str, Path]  # group -> file with the tensors that devices start from
    progress: Callable[[int, int], None]  # reports how many devices have answered, of how many that were asked
    outcome: Future[RegionAnswer] = field(default_factory=Future)
    settled: Event = field(default_factory=Event)  # the answer is on disk, or is not needed any more


class Centre(Protocol):
    """The link of a region to its centre; every method returns at once, but `close`."""

    def open(self, counts: RegionCounts) -> None:
        """Begin to take part in the centre's runs; again: nothing."""
        ...

    def task(self) -> CentralTask | None:
        """The task that has no answer yet."""
        ...

    def ended(self) -> str | None:
        """Return the end of the centre's run: `finished`, `cancelled` or None. Raise the error that ended the link."""
        ...

    def trouble(self) -> str:
        """Return the reason why this region is not connected to its centre's broker; empty while it is."""
        ...

    def close(self) -> None:
        """Leave, once a given answer has been sent."""
        ...


class Withdrawn(Exception):
    """The centre does not wait for the answer to its task any longer."""


class TooFew(FedvitError):
    """Too few devices answered for an answer of the region."""


class RegionLead:
    """Leads the run of a region through the tasks of its centre. An update is made of `least_results` devices at least.

    Raises ConfigError if the centre's run has another configuration, and PeerRefused if the centre refuses the region.
    """

    def __init__(self, parts: RunParts, *, centre: Centre, least_results: int) -> None:
        (parts.folder / CENTRE).mkdir(parents=True, exist_ok=True)
        self._parts = parts
        self._state = parts.state
        self._centre = centre
        self._least_results = least_results
        self._at_work: CentralTask | None = None
        self._reported = 0  # devices that have answered, as last reported to the centre
        self._trouble = ""  # of the link to the centre, as last reported to the operator

    def close(self) -> None:
        self._centre.close()

    def on_tick(self) -> None:
        if (trouble := self._centre.trouble()) != self._trouble:
            self._trouble = trouble
            line = f"centre: {trouble}; trying again" if trouble else "centre: connected again"
            self._parts.operator_log(line)
        if task := self._at_work:
            self._centre.ended()  # raises the error that ended the link
            if task.outcome.cancelled():
                raise Withdrawn
            self._report_progress(task)

    def run(self, engine: RoundEngine) -> None:
        """Do the centre's tasks until its run has ended."""
        self._centre.open(self._counts())
        while task := self._next_task():
            self._at_work, self._reported = task, 0
            try:
                self._do(task, engine)
            except Withdrawn:
                self._drop(task, "the centre does not wait for the answer of this region any longer")
            except (EmptyCohort, TooFew) as error:
                self._refuse(task, error)
            finally:
                self._at_work = None
            self._parts.inbox.pump(task.settled.is_set)

    def _next_task(self) -> CentralTask | None:
        """Wait for a task; None at the end of the centre's run."""
        self._state.doing = "waiting for a task of the centre"
        self._parts.inbox.pump(lambda: bool(self._centre.ended() or self._centre.task()))
        if self._centre.ended() == "cancelled":
            self._parts.cancel("the centre's run was cancelled")
            self._parts.inbox.pump(lambda: False)  # ends with the request to cancel
        return self._centre.task()

    def _do(self, task: CentralTask, engine: RoundEngine) -> None:
        state = self._state
        state.number = task.round
        self._check_task(task)
        self._parts.inbox.in_background(partial(self._take_state, task))
        self._await_devices(task)
        for left in state.store.rounds.read_open(state.run):
            if task.kind == "evaluate" or left.round != task.round:  # the centre closed it without this region
                state.store.rounds.close(state.run, left.round, state.newest(), {}, RoundWork(results=[]))
        if task.kind == "evaluate":
            self._evaluate(task, engine)
            return
        record = state.store.rounds.read(state.run, task.round)
        if record and record.closed_at:
            raise TooFew(
                "FV2206", f"round {task.round}: the region has answered before, and its devices' updates are deleted"
            )
        engine.train(task.round, record)
        engine.finish(task.round)

    # --- the centre's task --------------------------------------------------------------------------------

    def _check_task(self, task: CentralTask) -> None:
        """Raises ConfigError if the region's configuration is not that of the centre's run."""
        config, planned = self._state.config, self._planned(task.round)
        own = self._state.program(planned.program)
        # a region may add up its devices' results in secret for itself
        compared = [name for name in own.__struct_fields__ if name not in ("v", "secure")]
        differs = [name for name in compared if getattr(own, name) != getattr(task.program, name)]
        differs += [
            name for name, ours, theirs in (
                ("seed", config.seed, task.seed), ("rounds or schedule", planned.lr_scale, task.lr_scale)
            ) if ours != theirs
        ]  # fmt: skip
        if differs:
            error = ConfigError(
                "FV2203",
                f"the run of the centre and that of this region differ in {', '.join(differs)}: give both the same "
                "method, model, classes, rounds and seed, and install the same versions",
            )
            self._refuse(task, error)
            raise error

    def _planned(self, number: int) -> PlannedTask:
        """The task of a device without a profile."""
        return self._parts.ask(PlanTasks(round=number, saved=self._state.newest(), targets={"": None})).tasks[""]

    def _take_state(self, task: CentralTask) -> None:
        """Take the centre's tensors as the region's newest. Raises Withdrawn."""
        try:
            groups = {group: self._state.blobs.put(file.read_bytes()).digest for group, file in task.groups.items()}
        except FileNotFoundError:  # the link has deleted it for another task
            raise Withdrawn from None
        self._state.saved = SavedState(self._state.newest().groups | groups, None, {})

    def _await_devices(self, task: CentralTask) -> None:
        """Wait for devices that may be about to return. Raises TooFew if too few are online."""
        presence, least = self._state.presence, self._least_results if task.kind == "train" else 1
        self._state.doing = f"round {task.round}: waiting for {format_count(least, 'device')}"
        until = time.monotonic() + self._state.config.rejoin_grace_s
        if not self._parts.inbox.pump(lambda: len(presence.available()) >= least, deadline=until):
            raise TooFew(
                "FV2206",
                f"round {task.round}: {len(presence.available())} of the {least} devices that an answer of this region "
                "needs can be asked",
            )

    def _drop(self, task: CentralTask, reason: str) -> None:
        """Cancel what devices do for a task."""
        self._parts.operator_log(f"round {task.round}: {reason}")
        self._parts.collector.dismiss(list(self._state.tasks), reason)
        self._parts.collector.close_round()

    def _report_progress(self, task: CentralTask) -> None:
        opened = self._state.opened
        if opened and (done := len(opened.accepted) + len(opened.failed)) != self._reported:
            self._reported = done
            task.progress(done, len(opened.cohort))

    # --- its answer ---------------------------------------------------------------------------------------

    def step(self, opened: OpenRound, results: list[ResultRecord]) -> NextState:
        """Send the centre the mean of the updates. The next state comes with its next task."""
        number, state, least = opened.number, self._state, self._least_results
        devices = _count_devices(results)
        if devices < least:
            failed = ", ".join(f"{device} ({why.value})" for device, why in sorted(opened.failed.items())[:10])
            raise TooFew(
                "FV2206",
                f"round {number}: {devices} of the {least} results came that an update of this region needs"
                f"{'; without ' if failed else ''}{failed}",
            )
        state.doing = f"round {number}: one update for the centre"
        strike_outliers(self._parts, number)
        folded = self._parts.ask(Fold(round=number, saved=state.newest()))
        metrics = {"devices": float(devices)}
        if losses := [(result.metrics["loss"], result.samples) for result in results if "loss" in result.metrics]:
            metrics["loss"] = sum(loss * samples for loss, samples in losses) / max(1, folded.samples)
        self._answer(results, folded.samples, metrics, update=state.blobs.path(folded.update))
        return NextState(saved=state.newest(), figures=folded.figures, damaged={}, needed=folded.needed)

    def _evaluate(self, task: CentralTask, engine: RoundEngine) -> None:
        state, number = self._state, task.round
        engine.add_up_evaluation(engine.mode.evaluate(number))
        results = state.results(number, "evaluate")
        tested = [result for result in results if "correct" in result.metrics]  # the sum, if the run is secure
        if not tested:
            raise TooFew("FV2206", f"round {number}: no device of this region returned an evaluation")
        if state.store.rounds.read(state.run, number):  # the region may not have trained in it
            state.store.rounds.close_evaluation(state.run, number, results)
            engine.finish(number)
        metrics = {
            "devices": float(_count_devices(results)),
            "correct": sum(result.metrics["correct"] for result in tested),
        }
        self._answer(results, sum(result.samples for result in tested), metrics, by_class=_by_class(tested))

    def _answer(
        self,
        results: list[ResultRecord],
        samples: int,
        metrics: dict[str, float],
        *,
        update: Path | None = None,
        by_class: tuple[ClassCount, ...] = (),
    ) -> None:
        """Give the task its answer, and wait until the link has stored it. Raises Withdrawn."""
        task = self._at_work
        assert task is not None  # only tasks are answered
        flops = [result.use.flops for result in results if result.use.flops is not None]
        counts, field = self._counts(), "train_samples" if task.kind == "train" else "test_samples"
        answer = RegionAnswer(
            samples=samples,
            metrics=metrics,
            # a device may have removed images since its answer
            counts=counts._replace(**{field: max(samples, getattr(counts, field))}),
            flops=sum(flops) if flops else None,
            update=update,
            by_class=by_class,
        )
        try:
            task.outcome.set_result(answer)
        except InvalidStateError:
            raise Withdrawn from None
        self._parts.inbox.pump(task.settled.is_set)
        what = f"{format_count(int(metrics['devices']), 'device')} with {format_count(samples, 'image')}"
        self._parts.operator_log(f"round {task.round}: {task.kind} answer of {what} is stored for the centre")

    def _refuse(self, task: CentralTask, error: Exception) -> None:
        """Tell the centre why there is no answer."""
        log.warning("no answer for the centre", extra={"round": task.round, "reason": str(error)})
        self._parts.operator_log(f"round {task.round}: no answer for the centre: {error}")
        try:
            task.outcome.set_exception(error)
        except InvalidStateError:
            return
        self._parts.inbox.pump(task.settled.is_set)

    def _counts(self) -> RegionCounts:
        hellos = [device.hello for device in self._state.presence]
        train, test = sum(hello.train_samples for hello in hellos), sum(hello.test_samples for hello in hellos)
        return RegionCounts(self._state.classes, train, test)


def _count_devices(results: list[ResultRecord]) -> int:
    """Count the devices whose results count: those of a secure sum, if there is one."""
    added = next((result for result in results if result.device == SUM), None)
    return int(added.metrics["devices"]) if added else len(results)


def _by_class(results: list[ResultRecord]) -> tuple[ClassCount, ...]:
    """The sums of all devices; none if a device does not count by class."""
    if not all(result.by_class for result in results if result.samples):
        return ()
    sums: dict[int, tuple[int, int]] = {}
    for count in (count for result in results for count in result.by_class):
        correct, images = sums.get(count.label, (0, 0))
        sums[count.label] = correct + count.correct, images + count.images
    return tuple(ClassCount(label, *sums[label]) for label in sorted(sums))
