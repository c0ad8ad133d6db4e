"""One round of a cohort: each device's work is planned and stored, tasks are assigned, and answers awaited.

The store has all of it before a device is asked: after `kill -9` the same round continues.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from coordinator.compute.messages import Compute, LearningRates, PlanTasks
from coordinator.record.tables import RoundRecord, TaskRecord
from coordinator.rounds.collector import ResultCollector
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.inbox import Inbox
from coordinator.rounds.membership import Membership
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.scheduler import TaskScheduler
from coordinator.rounds.selector import CohortSelector
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import TaskState, Work
from coordinator.rounds.validation import few
from fedvit.wire.messages import TaskKind

BACK_S = 5.0
"""Longest wait of an evaluation for devices that have just gone offline."""


class RoundRunner:
    """Runs the rounds of one run for its `Mode`."""

    def __init__(
        self,
        state: RunState,
        inbox: Inbox,
        compute: Compute,
        *,
        selector: CohortSelector,
        profiles: DeviceProfiles,
        membership: Membership,
        scheduler: TaskScheduler,
        collector: ResultCollector,
    ) -> None:
        self.state = state
        self.selector = selector
        self._inbox = inbox
        self._compute = compute
        self._profiles = profiles
        self._membership = membership
        self._scheduler = scheduler
        self._collector = collector

    def wait(self, until: Callable[[], bool]) -> None:
        """Serve devices until a condition holds."""
        self._inbox.pump(until)

    # --- tasks ------------------------------------------------------------------------------------------------

    def plan(self, cohort: Iterable[str]) -> dict[str, Work]:
        """Plan each device's Program for the round and the tensors that the server sends.

        A device without a Program that fits its budget is informed and left out.
        """
        state = self.state
        targets = {device: self._profiles.of(device) for device in cohort}
        if not targets:
            return {}
        request = PlanTasks(round=state.number, saved=state.newest(), targets=targets)

        def make() -> tuple[dict[str, Work], dict[str, str]]:
            planned = self._compute.ask(request)
            work = {
                device: Work(
                    task.program,
                    state.program(task.program),
                    task.groups,
                    task.expected,
                    task.delta_chain,
                    task.lr_scale,
                )
                for device, task in planned.tasks.items()
            }
            for digest in {digest for part in work.values() for digest in part.offered()}:
                # in the background, since this verifies blobs that were not read yet
                state.blobs.manifest(digest)
            return work, planned.too_small

        work, too_small = self._inbox.in_background(make)
        for device, reason in too_small.items():
            state.refuse(device, "plan", reason, state.number)
            self._membership.send_away(device, reason)
            state.operator_log(f"{device} is left out: {reason}")
        return work

    def recorded(self, tasks: Iterable[TaskRecord]) -> dict[str, Work]:
        """The work that an earlier process assigned, by device, to be assigned again unchanged, even if the device has
        not sent a hello yet. Tasks with missing blobs are left out."""
        state = self.state
        intact = [task for task in tasks if all(map(state.blobs.has, (task.program, *task.groups.values())))]
        asked = LearningRates(tasks=[(task.device, task.round) for task in intact])
        scales = self._inbox.in_background(lambda: self._compute.ask(asked)) if intact else []
        return {
            task.device: Work(
                task.program,
                state.program(task.program),
                task.groups,
                task.expected,
                lr_scale=scale,
                attempt=task.attempt,
            )
            for task, scale in zip(intact, scales, strict=True)
        }

    def record_tasks(self, work: dict[str, Work]) -> None:
        """Store the tasks and their expected cost, before they are sent to devices."""
        number = self.state.number
        if mirror := self.state.mirror:
            offered = {digest for part in work.values() for digest in part.offered()}
            self._inbox.in_background(lambda: mirror(offered))
        tasks = [
            TaskRecord(number, device, part.digest, part.groups, part.expected, part.attempt)
            for device, part in work.items()
            if device not in self.state.counted
        ]
        self.state.store.tasks.add(self.state.run, tasks)

    def assign(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        """Assign a task; it is sent now, or after the device's hello."""
        self._scheduler.assign(device, number, kind, work)

    # --- rounds -----------------------------------------------------------------------------------------------

    def open(self, opened: OpenRound) -> None:
        """Open a round: results count in it from now on."""
        self.state.open(opened)
        self.state.doing = f"round {opened.number}/{self.state.config.rounds}: {opened.kind}"

    def close(self, opened: OpenRound) -> None:
        """Close a round: no more results are awaited."""
        for why in (Missing.DEADLINE, Missing.OFFLINE, Missing.CRASHED, Missing.REVOKED):
            if missing := sorted(device for device, reason in opened.failed.items() if reason is why):
                closed = f"{opened.kind} closed without {', '.join(few(missing))} ({why.value})"
                self.state.operator_log(f"round {opened.number}: {closed}")
        self._collector.close_round()

    def ask(self, opened: OpenRound) -> OpenRound:
        """Assign tasks, and wait until the round closes by quorum, deadlines or absence."""
        state = self.state
        self.open(opened)
        for device in opened.waiting_for():
            self._scheduler.assign_open(device)
        grace_s = state.config.rejoin_grace_s
        self.wait(lambda: opened.closes() or opened.given_up(state.presence, grace_s))
        asked = [task for task in state.tasks if opened.waits_for(task.device)]
        enough = opened.closes()
        for task in () if enough else asked:
            opened.fail(task.device, Missing.OFFLINE)
        self.close(opened)
        if state.waits_for_late(opened.kind):
            return opened
        if enough:
            self._collector.dismiss(asked, f"late: round {opened.number} has the results that it needs", TaskState.LATE)
        else:
            for task in asked:
                self._collector.give_up(task, Missing.OFFLINE, "no result: offline")
        return opened

    def evaluate(self, leave: Iterable[str]) -> None:
        """Let online devices, except those in `leave`, test their models on their own test images."""
        state = self.state
        # after a restart of the broker all devices are offline for a moment
        patience_s = min(BACK_S, state.config.rejoin_grace_s)
        self.wait(lambda: not state.presence.may_return(patience_s))
        excluded = set(leave)
        cohort, needed = self.selector.select_for_evaluation(
            [device for device in self.selector.available() if device not in excluded]
        )
        work = self.plan(cohort)
        if work:
            self.ask(OpenRound(state.run, state.number, "evaluate", work, min(needed, len(work)), work))


class Mode(Protocol):
    """How rounds follow each other: one file of `coordinator.rounds.modes`, one row of its table."""

    def __init__(self, runner: RoundRunner) -> None: ...

    def train(self, record: RoundRecord | None) -> OpenRound:
        """Run the training of the current round until no more results are awaited.

        `record`: the round as an earlier process opened it; None for a new round.
        """
        ...

    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        """Whether a task of round `assigned_in` continues after a restart; others are assigned again."""
        ...

    def busy(self) -> list[str]:
        """Devices that continue their training while the others are evaluated."""
        ...
