"""One question to a cohort, while it is being answered: who was asked, who answered, who is missing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.display import DeviceLine
from coordinator.planner import Variant
from coordinator.presence import Presence
from fedvit.wire.messages import Failed, Progress, Result, TaskKind
from profiles.prediction import Expected


class Work(NamedTuple):
    """What one device is asked to do in a round."""

    variant: Variant
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None  # None: nothing is known of the device


@dataclass
class OpenRound:
    """A round of training or of evaluation; nothing of it need be saved, for the store knows the cohort and results."""

    run: str
    number: int
    kind: TaskKind
    cohort: list[str]
    needed: int  # results that close it at once
    work: dict[str, Work]  # by device
    opened_at: float = field(default_factory=time.monotonic)
    accepted: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # device -> reason
    queue: dict[str, Result] = field(default_factory=dict)  # uploads that wait for their turn, in the order they came
    under_way: dict[str, Result] = field(default_factory=dict)  # uploads that are being fetched
    chunks_under_way: int = 0  # of those, at most
    readers: dict[str, set[str]] = field(default_factory=dict)  # digest -> devices that were given a task with it
    progress: dict[str, Progress] = field(default_factory=dict)
    _windows: dict[str, int] = field(default_factory=dict)  # device -> chunks of its upload under way
    _alone_since: float | None = None

    def asked(self, message: Result | Failed | Progress) -> bool:
        """Whether the message is about this round."""
        return (message.run, message.round, message.kind) == (self.run, self.number, self.kind)

    def waiting_for(self) -> list[str]:
        return list(self._missing())

    def waits_for(self, device: str) -> bool:
        """Whether the device was asked and has not answered."""
        return device in self.work and device not in self.accepted and device not in self.failed

    def _missing(self) -> Iterator[str]:
        return (name for name in self.cohort if name not in self.accepted and name not in self.failed)

    def closes(self) -> bool:
        return len(self.accepted) >= self.needed or not any(self._missing())

    def fail(self, device: str, reason: str) -> None:
        """The device will not bring a result that counts."""
        if self.waits_for(device):
            self.failed[device] = reason

    def is_uploading(self, device: str) -> bool:
        return device in self.under_way or device in self.queue

    def start(self, device: str, result: Result, chunks: int) -> None:
        """An upload is being fetched, of which at most so many chunks are under way."""
        self.under_way[device] = result
        self._windows[device] = chunks
        self.chunks_under_way += chunks

    def end(self, device: str) -> None:
        """Its upload is here, or will not come."""
        self.under_way.pop(device, None)
        self.chunks_under_way -= self._windows.pop(device, 0)

    def late_uploads(self) -> list[tuple[str, Result]]:
        """What was announced, but did not arrive before the round closed."""
        return [*self.under_way.items(), *self.queue.items()]

    def device_left(self, device: str) -> None:
        """It may come back; what it was sending is begun anew then."""
        self.end(device)
        self.progress.pop(device, None)
        self.queue.pop(device, None)

    def given_up(self, presence: Presence, grace_s: float) -> bool:
        """Whether all that is missing went offline and did not come back within the grace."""
        if any(presence.is_online(name) for name in self._missing()):
            self._alone_since = None
            return False
        now = time.monotonic()
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since >= grace_s

    def lines(self, presence: Presence) -> list[DeviceLine]:
        """What each device of the cohort is doing."""
        lines = []
        for device in self.cohort:
            known = self.progress.get(device)
            if device in self.accepted:
                state = "done"
            elif device in self.failed:
                state = "failed"
            elif self.is_uploading(device):
                state = "uploading"
            elif not presence.is_online(device):
                state = "offline"
            else:
                state = self.kind if known else "fetching"
            done, total = (known.done_steps, known.total_steps) if known else (0, 1)
            lines.append(DeviceLine(device, state, done, total, known.loss if known else None))
        return lines
