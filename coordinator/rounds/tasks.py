"""Tasks: what each device works on, the states of a task, and which blobs a device may request.

A device has one task at a time. A task is offered, then its device fetches, works and uploads, then its result is
checked and accepted. It may end otherwise from any of these states; ends are final.
The store has training tasks from before they are offered until they end. The states in between are not stored: after a
restart the device repeats the same work, since its random draws follow from run, round and device.
"""

import enum
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from coordinator.compute.messages import PlannedTask
from coordinator.record.tables import TaskTimes, now
from coordinator.rounds.deadlines import Deadline, Links
from fedvit.blobs import BlobStore, digest_of
from fedvit.program import Program
from fedvit.task_names import TaskName
from fedvit.wire.messages import BlobNack, Declined, Failed, Hello, Progress, Result, TaskKind

ID_LETTERS = 32


class TaskState(enum.StrEnum):
    """The first five are states of a task that is under way, the others are ends."""

    OFFERED = "offered"  # it was sent, or will be after the device's hello
    FETCHING = "fetching"  # the device requests blobs
    WORKING = "working"  # the device has reported steps
    UPLOADING = "uploading"  # its result arrived; the upload is fetched or queued
    CHECKED = "checked"  # the result is valid, and about to be stored
    ACCEPTED = "accepted"
    DECLINED = "declined"  # the device does not work now
    FAILED = "failed"  # the device cannot do it, or its result was refused
    LATE = "late"  # the round closed without it
    DEADLINE = "deadline"  # no result in time, from a device that was online
    OFFLINE = "offline"  # the device left, and did not return in time
    CRASHED = "crashed"  # the device's process ended too often
    REVOKED = "revoked"  # the device may not take part any more
    CANCELLED = "cancelled"  # the run ended, or paused


_AT_WORK = {TaskState.OFFERED, TaskState.FETCHING, TaskState.WORKING}
_ENDS = set(TaskState) - _AT_WORK - {TaskState.UPLOADING, TaskState.CHECKED}
TRANSITIONS: dict[TaskState, set[TaskState]] = {
    # back to offered: the device restarted, or the link of an upload was lost
    TaskState.OFFERED: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.FETCHING: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.WORKING: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.UPLOADING: {TaskState.OFFERED, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.CHECKED: {TaskState.ACCEPTED, TaskState.FAILED, TaskState.CANCELLED},
    **{end: set() for end in _ENDS},
}
"""From each state, the states that may follow."""


_NOTED = {
    TaskState.FETCHING: "fetching_at",
    TaskState.WORKING: "working_at",
    TaskState.UPLOADING: "arrived_at",
    TaskState.CHECKED: "arrived_at",
}
"""States whose beginning is noted, by the field of `TaskTimes`."""


class Work(NamedTuple):
    """The work of one device in a round."""

    planned: PlannedTask
    program: Program
    attempt: int = 1  # number of the next attempt

    def named(self) -> list[str]:
        """Digests that the task names."""
        return [self.planned.program, *self.program.list_fetched_once(), *self.planned.groups.values()]

    def offered(self) -> set[str]:
        """Digests that the device may request."""
        return {*self.named(), *(delta.patch.digest for delta in self.planned.delta_chain)}


BUNDLE_S = 60.0
"""Time in which a slow board writes a bundle of a large model, and measures it."""


def predicted_s(work: Work, kind: TaskKind, links: Links, device: str, blobs: BlobStore) -> float | None:
    """Predicted time of a task with its transfers; None if the device's speed is unknown.

    Everything that the task names counts as fetched: only the device knows what it already has.
    """
    if (expected := work.planned.expected) is None:
        return None
    prediction = expected.prediction
    computing_s = prediction.train_s if kind == "train" else prediction.evaluate_s
    if computing_s is None:
        return None
    if kind == "compare":  # two models answer, and a bundle of one is written and measured
        computing_s = 2 * computing_s + BUNDLE_S
    down_bytes = sum(blobs.manifest(digest).size for digest in set(work.named()))
    return computing_s + links.seconds(device, down_bytes + (expected.bytes_up if kind == "train" else 0))


def most_steps(program: Program, kind: TaskKind, hello: Hello) -> int:
    """Most steps that a device with these images can report."""
    if kind == "train":
        return sum(program.steps_of(phase, hello.train_samples) for phase in program.train)
    # batches of test images, for each of two models if they are compared, and of training images whose features are
    # collected first
    tests = hello.test_samples * (2 if kind == "compare" else 1)
    return -(-(tests + hello.train_samples) // program.batch.answer_size)


@dataclass(eq=False)
class DeviceTask:
    """A device's task; see `TaskState`."""

    run: str
    device: str
    round: int
    kind: TaskKind
    work: Work
    deadline: Deadline
    attempt: int = 1  # number of the current attempt
    state: TaskState = TaskState.OFFERED
    instance: str = ""  # the device's process to which it was sent last; empty: none yet
    offered_at: float = -math.inf  # monotonic; not sent before
    check_at: float = math.inf  # monotonic; next check of its deadline
    queued_at: float | None = None  # monotonic; since then it waits to be sent
    sent_over: tuple[str, int, int] | None = None  # process, connection and epoch in which it was sent last
    progress: Progress | None = None
    result: Result | None = None  # while it is uploaded and checked
    content: bytes | None = None  # an upload that came inside the message and is not stored yet
    check: Future[None] | None = None  # the check of an upload, in a thread
    missing: dict[str, int] = field(default_factory=dict)  # by blob: fewest missing chunks so far
    times: TaskTimes = field(default_factory=TaskTimes)  # of the current attempt

    @cached_property
    def id(self) -> str:
        """A digest of the work: equal for all devices with the same work."""
        work = self.work
        asked = (self.run, self.round, self.kind, *work.planned.identity())
        return digest_of(msgspec.msgpack.encode(asked)).partition(":")[2][:ID_LETTERS]

    def to(self, state: TaskState) -> None:
        """Change the state. Raises ValueError if the transition is not allowed."""
        if state not in TRANSITIONS[self.state]:
            what = f"the {self.kind} task of {self.device} in round {self.round}"
            raise ValueError(f"{what} is {self.state}: it cannot be {state} next")
        self.state = state
        if state is TaskState.OFFERED:
            self.times = TaskTimes(left_at=self.times.left_at, returned_at=self.times.returned_at)
        elif (noted := _NOTED.get(state)) and getattr(self.times, noted) is None:
            self.times = self.times._replace(**{noted: now()})

    def note_left(self, grace_s: float) -> None:
        """Note that the device is offline, and await its return for the grace period."""
        self.times = self.times._replace(left_at=now(), returned_at=None)
        self.deadline.note_left(time.monotonic(), grace_s)

    def note_returned(self) -> None:
        """Note that the device is online again."""
        if self.times.left_at and not self.times.returned_at:
            self.times = self.times._replace(returned_at=now())

    @property
    def name(self) -> TaskName:
        """The name of the current attempt in logs and traces."""
        return TaskName(self.run, self.round, self.device, self.kind, self.attempt)

    def log_fields(self) -> dict[str, object]:
        """Fields of log lines about the current attempt; the run is a field of all lines."""
        return {"device": self.device, "round": self.round, "kind": self.kind, "attempt": self.attempt}

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDS

    def concerns(self, message: Result | Failed | Declined | Progress) -> bool:
        """Return whether a message is about this task, or an earlier version of it; see `is_same`."""
        return (message.run, message.round, message.kind) == (self.run, self.round, self.kind)

    def is_same(self, message: Result | Failed | Declined | Progress) -> bool:
        """Return whether the message names the current version of the task, or none, as older software does."""
        return not message.task or message.task == self.id

    def fetched(self, want: BlobNack, chunk_bytes: int) -> int | None:
        """Bytes of a blob in such chunks that the device has received since its last request; None if there are none.

        The first request counts as news (0 bytes). A chunk that is reported missing again does not count twice.
        """
        missing, before = sum(count for _, count in want.missing), self.missing.get(want.digest)
        self.missing[want.digest] = missing if before is None else min(missing, before)
        if before is None:
            return 0
        return (before - missing) * chunk_bytes if missing < before else None

    def round_blobs(self) -> list[str]:
        """Digests of blobs that are new in this round; as deltas where the previous blobs can be used."""
        built = {delta.target for delta in self.work.planned.delta_chain}
        whole = (digest for digest in self.work.planned.groups.values() if digest not in built)
        return [*whole, *(delta.patch.digest for delta in self.work.planned.delta_chain)]


class Tasks:
    """The tasks that are under way, at most one per device, and which blobs a device may request."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[TaskKind, TaskState]] = Counter()  # since this process began
        self._by_device: dict[str, DeviceTask] = {}
        self._offered: dict[str, set[str]] = {}  # device -> digests of the task that was sent last
        self._receivers: dict[str, set[str]] = {}  # digest -> devices at work

    def __iter__(self) -> Iterator[DeviceTask]:
        return iter(list(self._by_device.values()))

    def __contains__(self, device: str) -> bool:
        return device in self._by_device

    def __len__(self) -> int:
        return len(self._by_device)

    def add(self, task: DeviceTask) -> None:
        self._by_device[task.device] = task

    def of(self, device: str) -> DeviceTask | None:
        return self._by_device.get(device)

    def matching(self, device: str, message: Result | Failed | Declined | Progress) -> DeviceTask | None:
        """The device's task, if the message is about it."""
        found = self._by_device.get(device)
        return found if found and found.concerns(message) else None

    def is_current(self, task: DeviceTask) -> bool:
        return self._by_device.get(task.device) is task

    def end(self, task: DeviceTask, state: TaskState) -> None:
        """End a task."""
        task.to(state)
        self.ended[task.kind, state] += 1
        if self.is_current(task):
            del self._by_device[task.device]
            for digest in self._offered.get(task.device, ()):
                self._forget_receiver(digest, task.device)

    def offer(self, task: DeviceTask) -> None:
        """A task is being sent: its device may request the blobs of this task, and no longer those of earlier ones."""
        offered, before = task.work.offered(), self._offered.get(task.device, set())
        for digest in before - offered:
            self._forget_receiver(digest, task.device)
        for digest in offered:
            self._receivers.setdefault(digest, set()).add(task.device)
        self._offered[task.device] = offered

    def keep_offers(self, needed: Collection[str]) -> None:
        """Devices may no longer request other blobs, which are removed."""
        for device, offered in self._offered.items():
            self._offered[device] = offered.intersection(needed)

    def may_read(self, device: str, digest: str) -> bool:
        return digest in self._offered.get(device, ())

    def offered(self, device: str) -> set[str]:
        """Digests of the task that was sent last to the device."""
        return self._offered.get(device, set())

    def count_receivers(self, digest: str) -> int:
        """Number of devices at work on a task with this blob that was sent to them: those that may request it."""
        return len(self._receivers.get(digest, ()))

    def _forget_receiver(self, digest: str, device: str) -> None:
        if (receivers := self._receivers.get(digest)) is not None:
            receivers.discard(device)
            if not receivers:
                del self._receivers[digest]
