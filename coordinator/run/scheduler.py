"""Giving tasks to devices, and keeping their time."""

import logging
import math
import time
from typing import NamedTuple

import msgspec

from coordinator.run.deadlines import Deadline
from coordinator.run.open_round import Missing
from coordinator.run.state import RunState
from coordinator.run.tasks import Task, TaskState, Work, most_steps, predicted_s
from fedvit.errors import BadPayload
from fedvit.transport.exchange import BlobExchange
from fedvit.wire import messages
from fedvit.wire.messages import BlobNack, Extended, Progress, TaskKind, inline_room

log = logging.getLogger(__name__)

KEEP_TIME_EVERY_S = 0.1
ATTEMPTS = 3
"""Times that a device is given the same task when its process ends at it."""
BACK_OFF_S = 2.0
"""Before a device that was started again is given its task for the third time; the second time is at once."""
PROGRESS_S = 0.5
LONGEST_PROGRESS_S = 10.0
"""A third of the shortest silence after which a device is given up."""
PROGRESS_PER_S = 200.0
"""Messages about progress that all devices of a cohort send together, as far as LONGEST_PROGRESS_S allows."""


class Overdue(NamedTuple):
    """A task whose device is waited for no longer; `reason` is for people."""

    task: Task
    why: Missing
    reason: str


class TaskScheduler:
    """One run's."""

    def __init__(self, state: RunState, exchange: BlobExchange) -> None:
        self._state = state
        self._exchange = exchange
        self._time_kept_at = -math.inf
        self._cannot_be_told: list[Overdue] = []

    # --- giving -----------------------------------------------------------------------------------------

    def give(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        """The device's task from now on; it is told if it is here, else when it says hello."""
        state = self._state
        now, limit_s = time.monotonic(), state.config.deadline_limit_s
        if state.config.deadline_s == "auto":
            predicted = predicted_s(work, kind, state.links, device, state.blobs)
            deadline = Deadline.expected(now, limit_s, predicted)
        else:
            late_s = limit_s if state.waits_for_late(kind) else 0.0
            deadline = Deadline.fixed(now, state.config.deadline_s, late_s)
        task = Task(state.run, device, number, kind, work, deadline, work.attempt)
        state.tasks.give(task)
        self.note_deadline(task)
        self.tell(task)

    def give_open(self, device: str) -> None:
        """A device is free: it gets its part of the open round, if that waits for it."""
        state, opened = self._state, self._state.opened
        if opened and device in opened.work and opened.waits_for(device) and device not in state.tasks:
            self.give(device, opened.number, opened.kind, opened.work[device])

    def on_arrival(self, device: str, *, was_away: bool) -> Overdue | None:
        """A device said hello: it is told what it is to do.

        Its task, where the device's process ended at it too often.
        """
        task = self._state.tasks.of(device)
        if task is None or task.state in (TaskState.UPLOADING, TaskState.CHECKED):
            return None
        now, instance = time.monotonic(), self._state.presence[device].hello.instance
        if task.instance not in ("", instance):  # another process of the device
            if task.attempt >= ATTEMPTS:
                reason = f"no result: its process ended {task.attempt} times at this task"
                return Overdue(task, Missing.CRASHED, reason)
            self._attempt_again(task, now)
        elif was_away:
            task.deadline.reconnected(now)
        self.tell(task)
        return None

    def _attempt_again(self, task: Task, now: float) -> None:
        """At once, and after a rest where it was given again before."""
        if task.attempt > 1:
            task.offered_at = now + BACK_OFF_S
        task.attempt += 1
        task.progress = None
        task.to(TaskState.OFFERED)
        task.deadline.restart(max(now, task.offered_at))
        if task.kind == "train":
            self._state.store.count_attempt(self._state.run, task.round, task.device, task.attempt)
        log.warning("task given again", extra={"device": task.device, "round": task.round, "attempt": task.attempt})

    def tell(self, task: Task) -> None:
        """Tell a device its task, if it is here, and not earlier than it may be."""
        state, device = self._state, task.device
        if not state.presence.is_online(device):
            return
        if time.monotonic() < task.offered_at:
            self.note_deadline(task)
            return
        state.tasks.offer(task)
        task.instance = state.presence[device].hello.instance
        work, deadline = task.work, task.deadline
        deadline.told = deadline.latest if state.waits_for_late(task.kind) else deadline.at
        self.note_deadline(task)
        asked = len(state.opened.cohort) if state.opened else 1
        message = messages.Task(
            instance=task.instance,
            epoch=state.epoch,
            run=state.run,
            round=task.round,
            kind=task.kind,
            seed=state.config.seed,
            program=work.digest,
            groups=work.groups,
            blobs=tuple(state.blobs.manifest(digest) for digest in work.named()),
            deadline_s=max(1.0, deadline.told - time.monotonic()),
            lr_scale=work.lr_scale,
            recipes=work.recipes,
            task=task.id,
            attempt=task.attempt,
            progress_s=min(LONGEST_PROGRESS_S, max(PROGRESS_S, asked / PROGRESS_PER_S)),
        )
        try:
            inline = state.blobs.small(task.once(), inline_room(message))
            state.send(device, msgspec.structs.replace(message, inline=inline))
        except BadPayload as error:  # too much is asked of it for one message
            self._cannot_be_told.append(Overdue(task, Missing.FAILED, f"no result: its task cannot be told: {error}"))

    # --- time -------------------------------------------------------------------------------------------

    def on_nack(self, device: str, want: BlobNack) -> None:
        """A device lacks chunks of a blob. Bytes that arrived there are a sign of life."""
        state = self._state
        try:
            self._exchange.on_nack(device, want)
        except BadPayload as error:
            state.refuse(device, "blob", str(error))
            return
        task = state.tasks.of(device)
        if task and (size := task.fetched(want)) is not None:
            task.deadline.moved(time.monotonic(), size)
            if task.state is TaskState.OFFERED:
                task.to(TaskState.FETCHING)

    def on_progress(self, device: str, progress: Progress) -> None:
        """The device says how far it is with its task."""
        state = self._state
        task = state.tasks.meant(device, progress)
        if task is None or not task.is_same(progress) or task.state in (TaskState.UPLOADING, TaskState.CHECKED):
            return
        task.progress = progress
        task.to(TaskState.WORKING)
        if device in state.presence:
            most = most_steps(task.work.program, task.kind, state.presence[device].hello)
            total = min(progress.total_steps, most)  # else a device could make steps for ever
            task.deadline.progressed(time.monotonic(), progress.done_steps, total)
            self.note_deadline(task)  # the deadline may be earlier now

    def overdue(self, uploads: list[Task], waiting: set[str]) -> list[Overdue]:
        """Tasks whose devices are given up; those that are on their way are told that they have longer.

        `uploads` are tasks whose uploads are fetched; `waiting` are devices of these whose turn has not come.
        """
        now = time.monotonic()
        if now - self._time_kept_at < KEEP_TIME_EVERY_S:
            return []
        self._time_kept_at = now
        for task in uploads:
            self._watch_upload(task, now, waits=task.device in waiting)
        overdue, self._cannot_be_told = self._cannot_be_told, []
        for task in self._state.tasks:
            if task.look_at > now or task.state is TaskState.CHECKED:  # what is checked is accepted in a moment
                continue
            task.look_at = math.inf
            if found := self._look_at(task, now):
                overdue.append(found)
            else:
                self.note_deadline(task)
        return overdue

    def _look_at(self, task: Task, now: float) -> Overdue | None:
        state, deadline, device = self._state, task.deadline, task.device
        if -math.inf < task.offered_at <= now:
            task.offered_at = -math.inf
            self.tell(task)
        late, opened = state.waits_for_late(task.kind), state.opened
        if opened and now >= deadline.at and (opened.number, opened.kind) == (task.round, task.kind):
            opened.fail(device, Missing.DEADLINE)
        if now >= (deadline.latest if late else deadline.at) or now >= deadline.upload_until:
            if now >= deadline.upload_until:
                log.warning("upload too slow", extra={"device": device, "round": task.round})
            return Overdue(task, Missing.DEADLINE, "no result: deadline")
        if not late and state.presence.is_online(device) and (more_s := deadline.extension(now)):
            deadline.told = deadline.at
            state.send(device, Extended(state.run, task.round, task.kind, more_s))
        return None

    def note_deadline(self, task: Task) -> None:
        """Note when the task's deadline has to be looked at next: to be called where that may be earlier now."""
        deadline, now = task.deadline, time.monotonic()
        at = min(deadline.upload_until, deadline.latest if now >= deadline.at else deadline.at)
        if (
            deadline.told > 0
            and not self._state.waits_for_late(task.kind)
            and self._state.presence.is_online(task.device)
        ):
            at = min(at, max(now, now + (deadline.told - now) / 2))
        if task.offered_at > now:  # it is told then
            at = min(at, task.offered_at)
        task.look_at = min(task.look_at, max(at, now + KEEP_TIME_EVERY_S))

    def _watch_upload(self, task: Task, now: float, *, waits: bool) -> None:
        """An upload moves the deadline on while its bytes come; and it takes the place of others, so they must come."""
        deadline = task.deadline
        if waits:
            deadline.waits(now)
            return
        if not self._state.presence.is_online(task.device):
            deadline.interrupted()
        elif deadline.upload_until == math.inf:
            deadline.fetching(now)
        progress_at, size = self._exchange.take_progress(task.device)
        if size:
            deadline.moved(progress_at, size)
        self.note_deadline(task)
