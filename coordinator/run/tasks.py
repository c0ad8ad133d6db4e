"""Tasks: what each device is at work on, the states that a task goes through, and which blobs a device may ask for.

A device has one task at a time: a board does one thing at a time. A task is offered, then its device fetches, works
and uploads, then its result is checked and accepted. It may end otherwise from any of these; ends are final.
The store has training tasks from before they are offered until they end; what lies between is worth nothing to a
restart, since every draw of a device follows from run, round and device, and it does the same work again.
"""

import enum
import math
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from coordinator.run.deadlines import Deadline, Links
from fedvit.blobs import BlobStore, digest_of
from fedvit.program import Program
from fedvit.wire.messages import BlobNack, Declined, DeltaStep, Failed, Hello, Progress, Result, TaskKind
from fedvit.wire.transfer import CHUNK_BYTES
from profiles.prediction import Expected

ID_LETTERS = 32


class TaskState(enum.StrEnum):
    """The first five are those of a task that is under way, the others are its ends."""

    OFFERED = "offered"  # its device has been told, or will be when it says hello
    FETCHING = "fetching"  # the device asks for blobs
    WORKING = "working"  # the device has reported steps
    UPLOADING = "uploading"  # its result came; the upload is fetched, or waits for its turn
    CHECKED = "checked"  # the result is good, and about to be written
    ACCEPTED = "accepted"
    DECLINED = "declined"  # the device does not work now
    FAILED = "failed"  # the device cannot do it, or its result was refused
    LATE = "late"  # the round closed without it
    LOST = "lost"  # nothing came in time, or the device ended at it too often
    CANCELLED = "cancelled"  # the run ended, or paused


_AT_WORK = {TaskState.OFFERED, TaskState.FETCHING, TaskState.WORKING}
_ENDS = set(TaskState) - _AT_WORK - {TaskState.UPLOADING, TaskState.CHECKED}
TRANSITIONS: dict[TaskState, set[TaskState]] = {
    # back to offered: the device was started again, or the link of an upload was lost
    TaskState.OFFERED: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.FETCHING: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.WORKING: _AT_WORK | {TaskState.UPLOADING, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.UPLOADING: {TaskState.OFFERED, TaskState.CHECKED} | _ENDS - {TaskState.ACCEPTED},
    TaskState.CHECKED: {TaskState.ACCEPTED, TaskState.FAILED, TaskState.CANCELLED},
    **{end: set() for end in _ENDS},
}
"""From each state, those that may follow."""


class Work(NamedTuple):
    """What one device is asked to do in a round."""

    digest: str  # of the Program
    program: Program
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None  # None: nothing is known of the device
    recipes: tuple[DeltaStep, ...] = ()  # how it may make blobs of `groups`
    lr_scale: float = 1.0  # factor on the learning rate
    attempt: int = 1  # how often the device was given it before, and once more

    def named(self) -> list[str]:
        """Digests of what a task names."""
        return [self.digest, *self.program.fetched_once(), *self.groups.values()]

    def offered(self) -> set[str]:
        """Digests of what a device may ask for."""
        return {*self.named(), *(recipe.patch.digest for recipe in self.recipes)}


def predicted_s(work: Work, kind: TaskKind, links: Links, device: str, blobs: BlobStore) -> float | None:
    """Time that a task should take with its transfers; None where the device's speed is not known.

    All that the task names counts as fetched: whether it is on the device already, only the device knows.
    """
    if work.expected is None:
        return None
    prediction = work.expected.prediction
    computing_s = prediction.train_s if kind == "train" else prediction.evaluate_s
    if computing_s is None:
        return None
    moved = sum(blobs.manifest(digest).size for digest in set(work.named()))
    return computing_s + links.seconds(device, moved + (work.expected.bytes_up if kind == "train" else 0))


def most_steps(program: Program, kind: TaskKind, hello: Hello) -> int:
    """Steps that a device with these images can report at most."""
    if kind == "train":
        return sum(program.steps_of(phase, hello.train_samples) for phase in program.train)
    # batches of test images, and before them those of images that a graph is run over to gather
    return -(-(hello.test_samples + hello.train_samples) // program.batch.answer_size)


@dataclass(eq=False)
class Task:
    """A device's task; see `TaskState`."""

    run: str
    device: str
    round: int
    kind: TaskKind
    work: Work
    deadline: Deadline
    attempt: int = 1  # how often the device was given it
    state: TaskState = TaskState.OFFERED
    instance: str = ""  # the process of the device that was told last; empty: none yet
    offered_at: float = -math.inf  # not before this time of the monotonic clock
    look_at: float = math.inf  # when its deadline is to be looked at next
    progress: Progress | None = None
    result: Result | None = None  # while it is uploaded and checked
    content: bytes | None = None  # of the upload, where it came inside the message and is not on the disk yet
    check: Future[None] | None = None  # what looks at a large upload
    missing: dict[str, int] = field(default_factory=dict)  # of blobs being fetched: the fewest chunks lacked so far

    @cached_property
    def id(self) -> str:
        """The same for every device of which the same is asked; another one whenever something else is asked."""
        work = self.work
        asked = (self.run, self.round, self.kind, work.digest, sorted(work.groups.items()), work.lr_scale)
        return digest_of(msgspec.msgpack.encode(asked)).partition(":")[2][:ID_LETTERS]

    def to(self, state: TaskState) -> None:
        """The next state. Raises ValueError for one that cannot follow."""
        if state not in TRANSITIONS[self.state]:
            what = f"the {self.kind} task of {self.device} in round {self.round}"
            raise ValueError(f"{what} is {self.state}: it cannot be {state} next")
        self.state = state

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDS

    def is_meant(self, message: Result | Failed | Declined | Progress) -> bool:
        """Whether a message is about this task, or about an earlier form of it; see `is_same`."""
        return (message.run, message.round, message.kind) == (self.run, self.round, self.kind)

    def is_same(self, message: Result | Failed | Declined | Progress) -> bool:
        """Whether the message names what is asked now; software that names no tasks is believed."""
        return not message.task or message.task == self.id

    def fetched(self, want: BlobNack) -> int | None:
        """Bytes of a blob that the device has since it asked before; None where nothing is new.

        The first question is news, too. What it had once and says to lack again is not counted twice.
        """
        missing, before = sum(count for _, count in want.missing), self.missing.get(want.digest)
        self.missing[want.digest] = missing if before is None else min(missing, before)
        if before is None:
            return 0
        return (before - missing) * CHUNK_BYTES if missing < before else None

    def once(self) -> list[str]:
        """What is of this round alone, in the form that takes fewest bytes of a device that had the round before."""
        made = {recipe.target for recipe in self.work.recipes}
        whole = (digest for digest in self.work.groups.values() if digest not in made)
        return [*whole, *(recipe.patch.digest for recipe in self.work.recipes)]


class Tasks:
    """The tasks that are under way, at most one a device, and which blobs a device may ask for."""

    def __init__(self) -> None:
        self._by_device: dict[str, Task] = {}
        self._offered: dict[str, set[str]] = {}  # device -> digests of the task that it was told last
        self._receivers: dict[str, set[str]] = {}  # the same by digest

    def __iter__(self) -> Iterator[Task]:
        return iter(list(self._by_device.values()))

    def __contains__(self, device: str) -> bool:
        return device in self._by_device

    def give(self, task: Task) -> None:
        self._by_device[task.device] = task

    def of(self, device: str) -> Task | None:
        return self._by_device.get(device)

    def meant(self, device: str, message: Result | Failed | Declined | Progress) -> Task | None:
        """The device's task, if the message is about it."""
        found = self._by_device.get(device)
        return found if found and found.is_meant(message) else None

    def is_current(self, task: Task) -> bool:
        return self._by_device.get(task.device) is task

    def end(self, task: Task, state: TaskState) -> None:
        """It is under way no more."""
        task.to(state)
        if self.is_current(task):
            del self._by_device[task.device]

    def offer(self, task: Task) -> None:
        """The device is being told its task: it may ask for the blobs of this one, and of none before."""
        offered, before = task.work.offered(), self._offered.get(task.device, set())
        for digest in before - offered:
            self._receivers[digest].discard(task.device)
            if not self._receivers[digest]:
                del self._receivers[digest]
        for digest in offered - before:
            self._receivers.setdefault(digest, set()).add(task.device)
        self._offered[task.device] = offered

    def may_read(self, device: str, digest: str) -> bool:
        return digest in self._offered.get(device, ())

    def offered(self, device: str) -> set[str]:
        """Digests of the task that the device was told last."""
        return self._offered.get(device, set())

    def receivers(self, digest: str) -> list[str]:
        """Devices at work on a task with this blob: those that may ask for it."""
        return [device for device in self._receivers.get(digest, ()) if device in self._by_device]
