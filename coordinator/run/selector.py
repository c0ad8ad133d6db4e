"""A question to a cohort: who can be asked, what each is given, and until when answers are awaited.

The store knows all of it before a device is told: after `kill -9` the same question goes on.
"""

import math
from collections.abc import Iterable
from typing import Protocol

from coordinator.compute.messages import Compute, PlanTasks
from coordinator.record.privacy import cohort_seed
from coordinator.record.tables import RoundRecord, TaskRecord
from coordinator.run.cohort import select_fair, select_uniform
from coordinator.run.collector import ResultCollector
from coordinator.run.device_profiles import Targets
from coordinator.run.inbox import Inbox
from coordinator.run.membership import Membership
from coordinator.run.open_round import OpenRound
from coordinator.run.presence import Presence
from coordinator.run.quarantine import Quarantine
from coordinator.run.scheduler import TaskScheduler
from coordinator.run.state import RunState
from coordinator.run.tasks import Assignments, Work

BACK_S = 5.0
"""Longer an evaluation does not wait for devices that have just gone."""


class CohortSelector:
    """What every mode of a run asks with; see `Mode`."""

    def __init__(
        self,
        *,
        course: RunState,
        compute: Compute,
        inbox: Inbox,
        presence: Presence,
        quarantine: Quarantine,
        targets: Targets,
        assignments: Assignments,
        results: ResultCollector,
        dispatch: TaskScheduler,
        reception: Membership,
    ) -> None:
        self.run, self.config, self.store = course.run, course.config, course.store
        self.course = course
        self.inbox = inbox
        self.presence = presence
        self.assignments = assignments
        self.results = results
        self.dispatch = dispatch
        self._compute = compute
        self._quarantine = quarantine
        self._targets = targets
        self._reception = reception

    # --- whom -------------------------------------------------------------------------------------------------

    def admitted(self, devices: Iterable[str]) -> list[str]:
        """Those that no quarantine keeps out of the round."""
        return self._quarantine.admitted(devices, self.course.number)

    def available(self) -> list[str]:
        """Who is here, does not rest, and is admitted."""
        return self.admitted(self.presence.available())

    def free(self) -> list[str]:
        """Who can be asked for the round that counts now."""
        return [
            device
            for device in self.available()
            if device not in self.assignments and device not in self.results.counted
        ]

    def all_are_back(self) -> bool:
        """Whether a round can be opened: not for the first who returns after all were gone for a moment."""
        return bool(self.presence.online()) and not self.presence.may_return(self.config.rejoin_grace_s)

    def select(self, devices: list[str], wanted: int) -> list[str]:
        """The cohort of the round, out of these."""
        number = self.course.number
        if self.config.selection == "fair":
            return select_fair(devices, wanted, self.config.seed, number, self.store.asked(self.run))
        return select_uniform(devices, wanted, cohort_seed(self.config), number)

    def quorum(self, cohort: int) -> int:
        return max(1, math.ceil(self.config.quorum * cohort - 1e-9))

    # --- what -------------------------------------------------------------------------------------------------

    def work(self, cohort: Iterable[str]) -> dict[str, Work]:
        """Every device's Program for the round, and the digests of what the server sends it.

        Whom nothing fits is told so, and left out.
        """
        course = self.course
        targets = {device: self._targets.of(device) for device in cohort}
        request = PlanTasks(round=course.number, saved=course.newest(), targets=targets)

        def make() -> tuple[dict[str, Work], dict[str, str]]:
            planned = self._compute.ask(request)
            work = {
                device: Work(
                    task.program,
                    course.program(task.program),
                    task.groups,
                    task.expected,
                    task.recipes,
                    task.lr_scale,
                )
                for device, task in planned.tasks.items()
            }
            for digest in {digest for part in work.values() for digest in part.offered()}:
                # here, since it reads what it has not read yet, and devices are served meanwhile
                course.blobs.manifest(digest)
            return work, planned.too_small

        work, too_small = self.inbox.in_background(make)
        for device, reason in too_small.items():
            self.results.refuse(device, "plan", reason, course.number)
            self._reception.send_away(device, reason)
            course.say(f"{device} is left out: {reason}")
        return work

    def record_tasks(self, work: dict[str, Work]) -> None:
        """Before devices are told: what they are asked, and what it is expected to cost."""
        number = self.course.number
        tasks = [TaskRecord(number, device, part.digest, part.groups, part.expected) for device, part in work.items()]
        self.store.add_tasks(self.run, [task for task in tasks if task.device not in self.results.counted])

    # --- until when -------------------------------------------------------------------------------------------

    def begin(self, opened: OpenRound) -> None:
        """Results count in it from now on."""
        self.results.open(opened)
        self.course.doing = f"round {opened.number}/{self.config.rounds}: {opened.kind}"

    def end(self, opened: OpenRound) -> None:
        """Nothing more is awaited for it."""
        for reason in ("deadline", "offline"):
            if missing := sorted(device for device, why in opened.failed.items() if why == reason):
                said = f"{opened.kind} closed without {', '.join(missing)} ({reason})"
                self.course.say(f"round {opened.number}: {said}")
        self.results.close()

    def ask(self, opened: OpenRound) -> OpenRound:
        """Give tasks, and wait until the round closes by quorum, deadlines or absence."""
        self.begin(opened)
        for device in opened.waiting_for():
            self.dispatch.give_open(device)
        self.inbox.pump(lambda: opened.closes() or opened.given_up(self.presence, self.config.rejoin_grace_s))
        asked = [assignment for assignment in self.assignments if assignment.device in opened.waiting_for()]
        enough = opened.closes()
        for assignment in () if enough else asked:
            opened.fail(assignment.device, "offline")
        self.end(opened)
        if self.dispatch.may_be_late(opened.kind):
            return opened
        if enough:
            self.dispatch.dismiss(asked, f"late: round {opened.number} has the results that it needs")
        else:
            for assignment in asked:
                self.dispatch.give_up(assignment, "offline")
        return opened

    def evaluate(self, leave: Iterable[str]) -> None:
        """Ask every device that is here how good its model is on its own test images; not those in `leave`."""
        # after the broker was started again all were gone for a moment
        patience_s = min(BACK_S, self.config.rejoin_grace_s)
        self.inbox.pump(lambda: not self.presence.may_return(patience_s))
        left = set(leave)
        work = self.work([device for device in self.available() if device not in left])
        if work:
            self.ask(OpenRound(self.run, self.course.number, "evaluate", list(work), len(work), work))


class Mode(Protocol):
    """How rounds follow each other: one file of `coordinator.run.modes`, one row of its table."""

    def __init__(self, asking: CohortSelector) -> None: ...

    def train(self, record: RoundRecord | None) -> OpenRound:
        """Ask for the results of the course's round, until no more of them are awaited.

        `record`: an earlier process opened it already.
        """
        ...

    def goes_on(self, assigned_in: int, open_round: int) -> bool:
        """Whether after a restart a device is left at a task of that round; others are asked anew."""
        ...

    def busy(self) -> list[str]:
        """Devices that are left at their training while the others are evaluated."""
        ...
