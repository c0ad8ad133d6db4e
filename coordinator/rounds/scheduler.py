"""Assigns tasks to devices and watches their deadlines."""

import heapq
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from coordinator.rounds.deadlines import Deadline
from coordinator.rounds.open_round import Missing
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import DeviceTask, TaskState, Work, most_steps, predicted_s
from fedvit.errors import BadPayload
from fedvit.transport.exchange import BlobExchange
from fedvit.wire import messages
from fedvit.wire.messages import BlobNack, Extended, Progress, TaskKind, inline_room

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.1
SPARE_CHECKS = 1000
"""Checks of tasks that have ended, or are checked earlier, beyond which such checks are removed."""
UNSENT_BYTES = 4 << 20
"""Limit of bytes that wait for the broker; above it further tasks wait: those of a large cohort have hundreds of
megabytes together."""
ATTEMPTS = 3
"""Most attempts at the same task, if the device's process ends during it."""
BACK_OFF_S = 2.0
"""Wait before the third attempt of a restarted device; the second attempt is immediate."""
LONGEST_S = 1e9
"""Longest time that a message can give a device."""
PROGRESS_S = 0.5
LONGEST_PROGRESS_S = 10.0
"""A third of the shortest silence that ends a task."""
PROGRESS_PER_S = 200.0
"""Progress messages of a whole cohort per second, as far as LONGEST_PROGRESS_S allows."""


class Overdue(NamedTuple):
    """A task that is given up; `reason` is text for the operator."""

    task: DeviceTask
    why: Missing
    reason: str


class TaskScheduler:
    """The tasks of one run."""

    def __init__(self, state: RunState, exchange: BlobExchange) -> None:
        self._state = state
        self._exchange = exchange
        self._checked_at = -math.inf
        self._checks: list[tuple[float, int, DeviceTask]] = []  # heap: when to check the deadlines of tasks
        self._number = itertools.count()  # of checks: tasks have no order
        self._queue: deque[DeviceTask] = deque()  # to be sent
        self._too_large: list[Overdue] = []

    # --- assigning --------------------------------------------------------------------------------------

    def assign(self, device: str, number: int, kind: TaskKind, work: Work) -> None:
        """Assign a task; it is sent now if the device is online, otherwise after its hello."""
        state = self._state
        now, limit_s = time.monotonic(), state.config.deadline_limit_s
        if state.config.deadline_s == "auto":
            predicted = predicted_s(work, kind, state.links, device, state.blobs)
            deadline = Deadline.expected(now, limit_s, predicted)
        else:
            late_s = limit_s if state.waits_for_late(kind) else 0.0
            deadline = Deadline.fixed(now, state.config.deadline_s, late_s)
        task = DeviceTask(state.run, device, number, kind, work, deadline, work.attempt)
        state.tasks.add(task)
        self.schedule_check(task)
        self.send_task(task)

    def assign_open(self, device: str) -> None:
        """Assign a free device its task of the open round, if the round waits for it."""
        state, opened = self._state, self._state.opened
        if opened and device in opened.work and opened.waits_for(device) and device not in state.tasks:
            self.assign(device, opened.number, opened.kind, opened.work[device])

    def on_arrival(self, device: str, *, was_away: bool) -> Overdue | None:
        """A device sent a hello: send it its task.

        Returns the task if the device's process ended too often during it.
        """
        task = self._state.tasks.of(device)
        if task:
            task.note_returned()
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
        self.send_task(task)
        return None

    def _attempt_again(self, task: DeviceTask, now: float) -> None:
        """Start another attempt: the second at once, the third after a backoff."""
        if task.attempt > 1:
            task.offered_at = now + BACK_OFF_S
        task.attempt += 1
        task.progress = None
        task.to(TaskState.OFFERED)
        task.deadline.restart(max(now, task.offered_at))
        if task.kind == "train":
            self._state.store.tasks.set_attempt(self._state.run, task.round, task.device, task.attempt)
        log.warning("task given again", extra=task.log_fields())

    def send_task(self, task: DeviceTask) -> None:
        """Send a task to its device when it is its turn, if the device is online and no backoff holds."""
        if not self._state.presence.is_online(task.device):
            return
        if time.monotonic() < task.offered_at:
            self.schedule_check(task)
            return
        if task.queued_at is None:
            task.queued_at = time.monotonic()
            self._queue.append(task)
        self.send_queued()

    def send_queued(self) -> None:
        """Send the tasks whose turn it is; to be called often."""
        state = self._state
        while self._queue and state.unsent_bytes() < UNSENT_BYTES:
            task = self._queue.popleft()
            queued_at, task.queued_at = task.queued_at, None
            if task.state in (TaskState.UPLOADING, TaskState.CHECKED) or not state.tasks.is_current(task):
                continue
            if queued_at is not None and state.presence.is_online(task.device):  # otherwise after its hello
                task.deadline.delayed(time.monotonic() - queued_at)
                self._send(task)

    def _send(self, task: DeviceTask) -> None:
        state, device = self._state, task.device
        hello = state.presence[device].hello
        over = (hello.instance, hello.connection, state.epoch)
        is_repeated, task.sent_over = task.sent_over == over, over
        state.tasks.offer(task)
        task.instance = hello.instance
        work, planned, deadline = task.work, task.work.planned, task.deadline
        deadline.announced = deadline.latest if state.waits_for_late(task.kind) else deadline.at
        self.schedule_check(task)
        asked = len(state.opened.cohort) if state.opened else 1
        signatures = state.find_signatures(work.program)
        message = messages.Task(
            instance=task.instance,
            epoch=state.epoch,
            run=state.run,
            round=task.round,
            kind=task.kind,
            seed=state.config.seed,
            program=planned.program,
            groups=planned.groups,
            blobs=tuple(state.blobs.manifest(digest) for digest in work.named()),
            deadline_s=min(LONGEST_S, max(1.0, deadline.announced - time.monotonic())),
            lr_scale=planned.lr_scale,
            recipes=planned.delta_chain,
            task=task.id,
            attempt=task.attempt,
            progress_s=min(LONGEST_PROGRESS_S, max(PROGRESS_S, asked / PROGRESS_PER_S)),
            publisher=state.signer.publisher if state.signer and signatures else "",
            signatures=signatures,
            trace=state.spans.ask(task),
            best=state.best,
            personal_of=state.config.start_from or "" if state.config.rounds == 0 else "",
        )
        try:
            state.send(device, self._complete(task, message, is_repeated=is_repeated))
            log.info("task asked", extra={**task.log_fields(), "deadline_s": message.deadline_s})
        except BadPayload as error:  # the task does not fit into one message
            self._too_large.append(Overdue(task, Missing.FAILED, f"no result: its task cannot be sent: {error}"))

    def _complete(self, task: DeviceTask, message: messages.Task, *, is_repeated: bool) -> messages.Task:
        """The message with small blobs inside. If the delta chains do not fit into one message, the device fetches
        whole values. A task that is only repeated has no blobs: the device has them, or fetches them. Raises
        BadPayload."""
        blobs = task.round_blobs()
        try:
            room = inline_room(message)
        except BadPayload:
            message = msgspec.structs.replace(message, recipes=())
            blobs, room = list(message.groups.values()), inline_room(message)
        inline = () if is_repeated else self._state.blobs.small(blobs, room)
        return msgspec.structs.replace(message, inline=inline)

    # --- deadlines --------------------------------------------------------------------------------------

    def on_nack(self, device: str, want: BlobNack) -> None:
        """A device requests missing chunks of a blob. Bytes that it has received are a sign of life."""
        state = self._state
        try:
            self._exchange.on_nack(device, want)
        except BadPayload as error:
            state.refuse(device, "blob", str(error))
            return
        task = state.tasks.of(device)
        if task and (size := task.fetched(want, self._state.blobs.chunk_bytes)) is not None:
            task.deadline.received(time.monotonic(), size)
            if task.state is TaskState.OFFERED:
                task.to(TaskState.FETCHING)
        if task and self._exchange.is_awaited(want.digest):
            task.deadline.kept_waiting(time.monotonic())

    def on_progress(self, device: str, progress: Progress) -> None:
        """The device reports the progress of its task."""
        state = self._state
        task = state.tasks.matching(device, progress)
        if task is None or not task.is_same(progress) or task.state in (TaskState.UPLOADING, TaskState.CHECKED):
            return
        task.progress = progress
        task.to(TaskState.WORKING)
        if device in state.presence:
            most = most_steps(task.work.program, task.kind, state.presence[device].hello)
            total = min(progress.total_steps, most)  # otherwise a device could report steps for ever
            task.deadline.progressed(time.monotonic(), progress.done_steps, total)
            self.schedule_check(task)  # the deadline may be earlier now

    def overdue(self, uploads: Collection[DeviceTask], waiting: Collection[str]) -> list[Overdue]:
        """Tasks to give up; devices that make progress are sent their extended deadlines.

        `uploads` are tasks whose uploads are fetched; `waiting` are the devices whose uploads are queued.
        """
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return []
        self._checked_at = now
        for task in uploads:
            self._watch_upload(task, now)
        overdue, self._too_large = self._too_large, []
        for task in self._due(now):
            if task.device in waiting:
                task.deadline.kept_waiting(now)
            if found := self._check_deadline(task, now):
                overdue.append(found)
            else:
                self.schedule_check(task)
        return overdue

    def _due(self, now: float) -> list[DeviceTask]:
        """Tasks whose deadlines are to be checked now; not those whose results are about to be accepted."""
        if len(self._checks) > 2 * len(self._state.tasks) + SPARE_CHECKS:
            self._checks = [check for check in self._checks if self._is_valid(check)]
            heapq.heapify(self._checks)
        due = []
        while self._checks and self._checks[0][0] <= now:
            check = heapq.heappop(self._checks)
            if self._is_valid(check):
                task = check[2]
                task.check_at = math.inf
                if task.state is not TaskState.CHECKED:
                    due.append(task)
        return due

    def _is_valid(self, check: tuple[float, int, DeviceTask]) -> bool:
        """Return whether the task is still under way, and was not checked earlier."""
        at, _, task = check
        return at == task.check_at and self._state.tasks.is_current(task)

    def _check_deadline(self, task: DeviceTask, now: float) -> Overdue | None:
        state, deadline, device = self._state, task.deadline, task.device
        if task.queued_at is not None:
            return None
        if -math.inf < task.offered_at <= now:
            task.offered_at = -math.inf
            self.send_task(task)
        late, opened = state.waits_for_late(task.kind), state.opened
        why = Missing.DEADLINE if state.presence.is_online(device) else Missing.OFFLINE
        if opened and now >= deadline.at and (opened.number, opened.kind) == (task.round, task.kind):
            opened.fail(device, why)
        if now >= (deadline.latest if late else deadline.at) or now >= deadline.upload_until:
            if now >= deadline.upload_until:
                log.warning("upload too slow", extra=task.log_fields())
            return Overdue(task, why, f"no result: {why.value}")
        if not late and state.presence.is_online(device) and (more_s := deadline.extension(now)):
            deadline.announced = deadline.at
            state.send(device, Extended(state.run, task.round, task.kind, more_s))
        return None

    def schedule_check(self, task: DeviceTask) -> None:
        """Schedule the next check of a task's deadline; to be called whenever it may be due earlier."""
        deadline, now = task.deadline, time.monotonic()
        at = min(deadline.upload_until, deadline.latest if now >= deadline.at else deadline.at)
        if (
            deadline.announced > 0
            and not self._state.waits_for_late(task.kind)
            and self._state.presence.is_online(task.device)
        ):
            at = min(at, max(now, now + (deadline.announced - now) / 2))
        if task.offered_at > now:  # it is sent then
            at = min(at, task.offered_at)
        if (at := max(at, now + CHECK_INTERVAL_S)) < task.check_at:
            task.check_at = at
            heapq.heappush(self._checks, (at, next(self._number), task))

    def _watch_upload(self, task: DeviceTask, now: float) -> None:
        """Received bytes of an upload extend the deadline; since it occupies an upload slot, they must keep coming."""
        deadline = task.deadline
        if not self._state.presence.is_online(task.device):
            deadline.interrupted()
        elif deadline.upload_until == math.inf:
            deadline.fetching(now)
        progress_at, size = self._exchange.take_progress(task.device)
        if size:
            deadline.received(progress_at, size)
        self.schedule_check(task)
