"""The trainer of a run on devices: plans their work, sends it, and serves them until their results are here."""

import logging
from collections.abc import Callable, Iterable

from coordinator.compute.messages import PlanTasks, RecallTasks
from coordinator.record.tables import SavedState, TaskRecord
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.parts import RunParts
from coordinator.rounds.pausing import wait_while_paused
from coordinator.rounds.ports import Trainer
from coordinator.rounds.tasks import TaskState, Work
from coordinator.rounds.validation import few

log = logging.getLogger(__name__)


class DeviceTrainer(Trainer):
    """A trainer whose devices are behind a broker."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state

    def begin(self, number: int, *, is_new: bool) -> None:
        self._state.number = number
        if is_new:
            wait_while_paused(self._parts, number)

    def plan(self, devices: Iterable[str]) -> dict[str, Work]:
        """Plan each device's Program for the round and the tensors that the server sends.

        A device without a Program that fits its budget is informed and left out.
        """
        state, parts = self._state, self._parts
        targets = {device: parts.profiles.of(device) for device in devices}
        if not targets:
            return {}
        request = PlanTasks(round=state.number, saved=self._find_saved(), targets=targets)

        def make() -> tuple[dict[str, Work], dict[str, str]]:
            planned = parts.compute.ask(request)
            work = {device: Work(task, state.program(task.program)) for device, task in planned.tasks.items()}
            for digest in {digest for part in work.values() for digest in part.offered()}:
                # in the background, since this verifies blobs that were not read yet
                state.blobs.manifest(digest)
            return work, planned.too_small

        work, too_small = parts.inbox.in_background(make)
        for device, reason in too_small.items():
            state.refuse(device, "plan", reason, state.number)
            parts.membership.send_away(device, reason)
            state.operator_log(f"{device} is left out: {reason}")
        for device in list(work):
            hello = state.presence[device].hello if device in state.presence else None
            needs = state.find_needs(work[device].program)
            if hello and (what := needs.find_denial(hello.denies, hello.least_mask, hello.publisher)):
                del work[device]
                parts.membership.set_aside(device, hello, what)
        return work

    def _find_saved(self) -> SavedState:
        """The state that devices get: the newest, or that of the best round, which they compare."""
        state = self._state
        if state.number == state.best and (best := state.store.rounds.read(state.run, state.best)) and best.state:
            return best.state
        return state.newest()

    def recall(self, tasks: Iterable[TaskRecord]) -> dict[str, Work]:
        """The work that an earlier process assigned, to be assigned again unchanged, even if the device has not sent a
        hello yet. Tasks with missing blobs end."""
        state, tasks = self._state, list(tasks)
        intact = [task for task in tasks if all(map(state.blobs.has, (task.program, *task.groups.values())))]
        lost = [(task.round, task.device) for task in tasks if task not in intact]
        state.store.tasks.end(state.run, lost, TaskState.CANCELLED)
        planned = self._parts.ask(RecallTasks(tasks=intact)) if intact else []
        return {
            task.device: Work(again, state.program(again.program), task.attempt)
            for task, again in zip(intact, planned, strict=True)
        }

    def open(self, opened: OpenRound) -> None:
        self._state.open(opened)
        self._state.doing = f"round {opened.number}/{self._state.config.rounds}: {opened.kind}"
        figures = {"cohort": len(opened.cohort), "needed": opened.needed}
        self._state.spans.open_round(opened.number, opened.kind, len(opened.cohort))
        log.info("round opened", extra={"round": opened.number, "kind": opened.kind, **figures})

    def offer(self, opened: OpenRound, devices: Iterable[str]) -> None:
        for device in devices:
            if device in opened.work and device not in self._state.tasks:
                self._parts.scheduler.assign(device, opened.number, opened.kind, opened.work[device])

    def wait(self, until: Callable[[], bool]) -> None:
        self._parts.inbox.pump(until)

    def close(self, opened: OpenRound) -> None:
        for why in (Missing.DEADLINE, Missing.OFFLINE, Missing.CRASHED, Missing.REVOKED):
            if missing := sorted(device for device, reason in opened.failed.items() if reason is why):
                closed = f"{opened.kind} closed without {', '.join(few(missing))} ({why.value})"
                self._state.operator_log(f"round {opened.number}: {closed}")
        self._parts.collector.close_round()

    def withdraw(self, opened: OpenRound, devices: Iterable[str]) -> None:
        state, collector = self._state, self._parts.collector
        if state.waits_for_late(opened.kind):
            return
        for task in filter(None, map(state.tasks.of, devices)):
            if task.kind != opened.kind:  # in mode buffered a device trains on while others are evaluated
                continue
            if opened.failed.get(task.device) is Missing.OFFLINE:
                collector.give_up(task, Missing.OFFLINE, "no result: offline")
            else:
                reason = f"late: round {opened.number} has the results that it needs"
                collector.dismiss([task], reason, TaskState.LATE)

    def add_up(self, opened: OpenRound) -> None:
        if self._state.config.secure:
            self._parts.sums.add_up(opened)

    def dismiss(self) -> None:
        self._parts.collector.dismiss(self._state.tasks, "the last round is closed")
