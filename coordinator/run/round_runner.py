"""One question to a cohort: each device's work is planned and written down, tasks are given, and answers awaited.

The store knows all of it before a device is told: after `kill -9` the same question goes on.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from coordinator.compute.messages import Compute, LearningRates, PlanTasks
from coordinator.record.tables import RoundRecord, TaskRecord
from coordinator.run.collector import ResultCollector
from coordinator.run.device_profiles import DeviceProfiles
from coordinator.run.inbox import Inbox
from coordinator.run.membership import Membership
from coordinator.run.open_round import Missing, OpenRound
from coordinator.run.scheduler import TaskScheduler
from coordinator.run.selector import CohortSelector
from coordinator.run.state import RunState
from coordinator.run.tasks import TaskState, Work
from fedvit.wire.messages import TaskKind

BACK_S = 5.0
"""Longer an evaluation does not wait for devices that have just gone."""


class RoundRunner:
    """One run's; what every mode works with, see `Mode`."""

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
        """Devices are served until something holds."""
        self._inbox.pump(until)

    # --- what -------------------------------------------------------------------------------------------------

    def plan(self, cohort: Iterable[str]) -> dict[str, Work]:
        """Every device's Program for the round, and the digests of what the server sends it.

        Devices that nothing fits are told so, and left out.
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
                    task.program, state.program(task.program), task.groups, task.expected, task.recipes, task.lr_scale
                )
                for device, task in planned.tasks.items()
            }
            for digest in {digest for part in work.values() for digest in part.offered()}:
                # here, since it reads what it has not read yet, and devices are served meanwhile
                state.blobs.manifest(digest)
            return work, planned.too_small

        work, too_small = self._inbox.in_background(make)
        for device, reason in too_small.items():
            state.refuse(device, "plan", reason, state.number)
            self._membership.send_away(device, reason)
            state.say(f"{device} is left out: {reason}")
        return work

    def recorded(self, tasks: Iterable[TaskRecord]) -> dict[str, Work]:
        """What an earlier process asked of devices, by device: the same is asked again, though nobody knows now what
        the device said of itself. Tasks whose blobs are not all here are left out."""
        state = self.state
        kept = [task for task in tasks if all(map(state.blobs.has, (task.program, *task.groups.values())))]
        asked = LearningRates(tasks=[(task.device, task.round) for task in kept])
        scales = self._inbox.in_background(lambda: self._compute.ask(asked)) if kept else []
        return {
            task.device: Work(
                task.program,
                state.program(task.program),
                task.groups,
                task.expected,
                lr_scale=scale,
                attempt=task.attempt,
            )
            for task, scale in zip(kept, scales, strict=True)
        }

    def write_down(self, work: dict[str, Work]) -> None:
        """Before devices are told: what they are asked, and what it is expected to cost."""
        number = self.state.number
        tasks = [
            TaskRecord(number, device, part.digest, part.groups, part.expected, part.attempt)
            for device, part in work.items()
            if device not in self.state.counted
        ]
        self.state.store.add_tasks(self.state.run, tasks)

    def give(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        """The device is told its task, now or when it says hello."""
        self._scheduler.give(device, number, kind, work)

    # --- until when -------------------------------------------------------------------------------------------

    def open(self, opened: OpenRound) -> None:
        """Results count in it from now on."""
        self.state.open(opened)
        self.state.doing = f"round {opened.number}/{self.state.config.rounds}: {opened.kind}"

    def close(self, opened: OpenRound) -> None:
        """Nothing more is awaited for it."""
        for why in (Missing.DEADLINE, Missing.OFFLINE, Missing.CRASHED):
            if missing := sorted(device for device, reason in opened.failed.items() if reason is why):
                closed = f"{opened.kind} closed without {', '.join(missing)} ({why.value})"
                self.state.say(f"round {opened.number}: {closed}")
        self._collector.close_round()

    def ask(self, opened: OpenRound) -> OpenRound:
        """Give tasks, and wait until the round closes by quorum, deadlines or absence."""
        state = self.state
        self.open(opened)
        for device in opened.waiting_for():
            self._scheduler.give_open(device)
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
        """Ask devices that are here how good their models are on their own test images; not those in `leave`."""
        state = self.state
        # after the broker was started again all were gone for a moment
        patience_s = min(BACK_S, state.config.rejoin_grace_s)
        self.wait(lambda: not state.presence.may_return(patience_s))
        left = set(leave)
        cohort, needed = self.selector.select_for_evaluation(
            [device for device in self.selector.available() if device not in left]
        )
        work = self.plan(cohort)
        if work:
            self.ask(OpenRound(state.run, state.number, "evaluate", work, min(needed, len(work)), work))


class Mode(Protocol):
    """How rounds follow each other: one file of `coordinator.run.modes`, one row of its table."""

    def __init__(self, runner: RoundRunner) -> None: ...

    def train(self, record: RoundRecord | None) -> OpenRound:
        """Ask for the results of the state's round, until no more of them are awaited.

        `record`: an earlier process opened it already.
        """
        ...

    def goes_on(self, assigned_in: int, open_round: int) -> bool:
        """Whether after a restart a device is left at a task of that round; others are asked anew."""
        ...

    def busy(self) -> list[str]:
        """Devices that are left at their training while the others are evaluated."""
        ...
