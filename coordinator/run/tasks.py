"""Who is at work on what: every task that a device was given and has not answered."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.run.deadlines import Deadline, Links
from fedvit.blobs import BlobStore
from fedvit.program import Program
from fedvit.wire.messages import Declined, Failed, Hello, Progress, Recipe, Result, TaskKind, Want
from fedvit.wire.transfer import CHUNK_BYTES
from profiles.prediction import Expected


class Work(NamedTuple):
    """What one device is asked to do in a round."""

    digest: str  # of the Program
    program: Program
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None  # None: nothing is known of the device
    recipes: tuple[Recipe, ...] = ()  # how it may make blobs of `groups`
    lr_scale: float = 1.0  # factor on the learning rate

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


@dataclass
class Assignment:
    """A device's task, until it is answered, failed, declined, cancelled or given up."""

    device: str
    round: int
    kind: TaskKind
    work: Work
    deadline: Deadline
    progress: Progress | None = None
    missing: dict[str, int] = field(
        default_factory=dict
    )  # of blobs that it fetches: the fewest chunks it lacked so far

    def is_meant(self, message: Result | Failed | Declined | Progress) -> bool:
        return (message.round, message.kind) == (self.round, self.kind)

    def fetched(self, want: Want) -> int | None:
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


class Assignments:
    """At most one task a device: a board does one thing at a time. And which blobs a device may ask for."""

    def __init__(self) -> None:
        self._by_device: dict[str, Assignment] = {}
        self._offered: dict[str, set[str]] = {}  # device -> digests of the task that it was told last
        self._takers: dict[str, set[str]] = {}  # the same by digest

    def __iter__(self) -> Iterator[Assignment]:
        return iter(list(self._by_device.values()))

    def __contains__(self, device: str) -> bool:
        return device in self._by_device

    def give(self, assignment: Assignment) -> None:
        self._by_device[assignment.device] = assignment

    def of(self, device: str) -> Assignment | None:
        return self._by_device.get(device)

    def meant(self, device: str, message: Result | Failed | Declined | Progress) -> Assignment | None:
        """The device's task, if the message is about it."""
        found = self._by_device.get(device)
        return found if found and found.is_meant(message) else None

    def end(self, device: str) -> None:
        self._by_device.pop(device, None)

    def offer(self, device: str) -> None:
        """The device is being told its task: it may ask for the blobs of this one, and of none before."""
        offered = self._by_device[device].work.offered()
        before = self._offered.get(device, set())
        for digest in before - offered:
            self._takers[digest].discard(device)
            if not self._takers[digest]:
                del self._takers[digest]
        for digest in offered - before:
            self._takers.setdefault(digest, set()).add(device)
        self._offered[device] = offered

    def may_read(self, device: str, digest: str) -> bool:
        return digest in self._offered.get(device, ())

    def offered(self, device: str) -> set[str]:
        """Digests of the task that the device was told last."""
        return self._offered.get(device, set())

    def takers(self, digest: str) -> list[str]:
        """Devices at work on a task with this blob: those that may ask for it."""
        return [device for device in self._takers.get(digest, ()) if device in self._by_device]
