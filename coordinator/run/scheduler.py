"""Tasks on their way: each device gets one at a time, has so long for it, and may be told to leave it."""

import logging
import math
import time
from collections.abc import Callable, Iterable

import msgspec

from coordinator.run.collector import ResultCollector
from coordinator.run.deadlines import Deadline
from coordinator.run.presence import Presence
from coordinator.run.state import RunState
from coordinator.run.tasks import Assignment, Assignments, Work, most_steps, predicted_s
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Cancel, Extended, FromCoordinator, Progress, Task, TaskKind, Want, inline_room

log = logging.getLogger(__name__)

KEEP_TIME_EVERY_S = 0.1


class TaskScheduler:
    """One run's. `tell(device, message)` sends; `epoch()` is that of the link, which tasks carry."""

    def __init__(
        self,
        *,
        course: RunState,
        presence: Presence,
        assignments: Assignments,
        results: ResultCollector,
        exchange: BlobExchange,
        tell: Callable[[str, FromCoordinator], None],
        epoch: Callable[[], int],
    ) -> None:
        self._run, self._config, self._store, self._blobs = course.run, course.config, course.store, course.blobs
        self._presence = presence
        self._assignments = assignments
        self._results = results
        self._exchange = exchange
        self._tell = tell
        self._epoch = epoch
        self._time_kept_at = -math.inf

    def give(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        """The device's task from now on; it is told if it is here, else when it says hello."""
        now, limit_s = time.monotonic(), self._config.deadline_limit_s
        if self._config.deadline_s == "auto":
            predicted = predicted_s(work, kind, self._results.links, device, self._blobs)
            deadline = Deadline.expected(now, limit_s, predicted)
        else:
            late_s = limit_s if self.may_be_late(kind) else 0.0
            deadline = Deadline.fixed(now, self._config.deadline_s, late_s)
        self._assignments.give(Assignment(device, number, kind, work, deadline))
        self._send(device)

    def give_open(self, device: str) -> None:
        """A device is free: it gets its part of the open round, if that waits for it."""
        opened = self._results.opened
        if opened and device in opened.work and opened.waits_for(device) and device not in self._assignments:
            self.give(device, opened.number, opened.kind, opened.work[device])

    def give_again(self, device: str, *, anew: bool) -> None:
        """A device said hello: it is told what it is to do; `anew`: in a new process, or after it was away."""
        assignment = self._assignments.of(device)
        if assignment is None or self._results.is_uploading(device):
            return
        if anew:
            assignment.deadline.restart(time.monotonic())
        self._send(device)

    def may_be_late(self, kind: TaskKind) -> bool:
        """Whether a device goes on with its task when its round is over."""
        return kind == "train" and self._config.mode == "rounds" and self._config.late != "refuse"

    # --- time -----------------------------------------------------------------------------------------------

    def wanted(self, device: str, want: Want) -> None:
        """The device says what it lacks of a blob that it may have: bytes that arrived there are a sign of life."""
        assignment = self._assignments.of(device)
        if assignment and (size := assignment.fetched(want)) is not None:
            assignment.deadline.moved(time.monotonic(), size)

    def progressed(self, device: str, progress: Progress) -> None:
        """The device says how far it is with its task."""
        if progress.run == self._run and (assignment := self._assignments.meant(device, progress)):
            assignment.progress = progress
            if device in self._presence:
                most = most_steps(assignment.work.program, assignment.kind, self._presence[device].hello)
                total = min(progress.total_steps, most)  # else a device could make steps for ever
                assignment.deadline.progressed(time.monotonic(), progress.done_steps, total)

    def keep_time(self) -> None:
        """Whose deadline has passed is given up; who is on its way is told that it has longer."""
        now = time.monotonic()
        if now - self._time_kept_at < KEEP_TIME_EVERY_S:
            return
        self._time_kept_at = now
        for assignment in self._assignments:
            device, deadline = assignment.device, assignment.deadline
            self._watch_upload(assignment, now)
            late = self.may_be_late(assignment.kind)
            opened = self._results.opened
            asked = (opened.number, opened.kind) if opened else None
            if opened and now >= deadline.at and asked == (assignment.round, assignment.kind):
                opened.fail(device, "deadline")
            if now >= (deadline.latest if late else deadline.at) or now >= deadline.upload_until:
                if now >= deadline.upload_until:
                    log.warning("upload too slow", extra={"device": device, "round": assignment.round})
                self.give_up(assignment, "deadline")
            elif not late and self._presence.is_online(device) and (more_s := deadline.extension(now)):
                deadline.told = deadline.at
                self._tell(device, Extended(self._run, assignment.round, assignment.kind, more_s))

    def _watch_upload(self, assignment: Assignment, now: float) -> None:
        """An upload moves the deadline on while its bytes come; and it takes the place of others, so they must come."""
        device, deadline = assignment.device, assignment.deadline
        if self._results.waits_for_its_turn(device):
            deadline.waits(now)
            return
        if not (self._results.is_uploading(device) and self._presence.is_online(device)):
            deadline.interrupted()
        elif deadline.upload_until == math.inf:
            deadline.fetching(now)
        moved_at, size = self._exchange.take_moved(device)
        if size:
            deadline.moved(moved_at, size)

    # --- taking tasks away ----------------------------------------------------------------------------------

    def give_up(self, assignment: Assignment, reason: str) -> None:
        """Its device brought nothing in time."""
        number, kind = assignment.round, assignment.kind
        if self._results.opened and self._results.opened.kind == kind:
            self._results.opened.fail(assignment.device, reason)
        self._store.add_refusal(self._run, number, assignment.device, kind, f"no result: {reason}")
        self.dismiss([assignment], f"late: round {number} does not wait for it any more", "lost")

    def dismiss(self, assignments: Iterable[Assignment], reason: str, outcome: str = "cancelled") -> None:
        """Devices need not go on: nothing of their task is kept, here or there."""
        for assignment in assignments:
            self._tell(assignment.device, Cancel(self._run, assignment.round, assignment.kind, reason))
            self._results.cancel(assignment, reason, outcome)
            self.give_open(assignment.device)

    def _send(self, device: str) -> None:
        """Tell a device what it is assigned, if it is here."""
        assignment = self._assignments.of(device)
        if assignment is None or not self._presence.is_online(device):
            return
        self._assignments.offer(device)
        work, deadline = assignment.work, assignment.deadline
        deadline.told = deadline.latest if self.may_be_late(assignment.kind) else deadline.at
        task = Task(
            instance=self._presence[device].hello.instance,
            epoch=self._epoch(),
            run=self._run,
            round=assignment.round,
            kind=assignment.kind,
            seed=self._config.seed,
            program=work.digest,
            groups=work.groups,
            blobs=tuple(self._blobs.manifest(digest) for digest in work.named()),
            deadline_s=max(1.0, deadline.told - time.monotonic()),
            lr_scale=work.lr_scale,
            recipes=work.recipes,
        )
        inline = self._blobs.small(assignment.once(), inline_room(task))
        self._tell(device, msgspec.structs.replace(task, inline=inline))
