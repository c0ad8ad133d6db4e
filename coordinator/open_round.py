"""One question to a cohort, while it is being answered: who was asked, who answered, who is missing."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.display import DeviceLine
from coordinator.planner import Variant
from coordinator.presence import Presence
from fedvit.wire.messages import Failed, Progress, Recipe, Result, TaskKind
from profiles.prediction import Expected


class Work(NamedTuple):
    """What one device is asked to do in a round."""

    variant: Variant
    groups: dict[str, str]  # group -> digest of the value that the server sends
    expected: Expected | None  # None: nothing is known of the device
    recipes: tuple[Recipe, ...] = ()  # how it may make blobs of `groups`


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
    queue: deque[tuple[str, Result]] = field(default_factory=deque)  # uploads that wait for their turn
    under_way: dict[str, Result] = field(default_factory=dict)  # uploads that are being fetched
    progress: dict[str, Progress] = field(default_factory=dict)
    _alone_since: float | None = None

    def asked(self, message: Result | Failed | Progress) -> bool:
        """Whether the message is about this round."""
        return (message.run, message.round, message.kind) == (self.run, self.number, self.kind)

    def waiting_for(self) -> list[str]:
        return [name for name in self.cohort if name not in self.accepted and name not in self.failed]

    def closes(self) -> bool:
        return len(self.accepted) >= self.needed or not self.waiting_for()

    def fail(self, device: str, reason: str) -> None:
        """The device will not bring a result that counts."""
        if device in self.waiting_for():
            self.failed[device] = reason

    def is_uploading(self, device: str) -> bool:
        return device in self.under_way or any(name == device for name, _ in self.queue)

    def late_uploads(self) -> list[tuple[str, Result]]:
        """What was announced, but did not arrive before the round closed."""
        return [*self.under_way.items(), *self.queue]

    def device_left(self, device: str) -> None:
        """It may come back; what it was sending is begun anew then."""
        self.under_way.pop(device, None)
        self.progress.pop(device, None)
        self.queue = deque((name, result) for name, result in self.queue if name != device)

    def given_up(self, presence: Presence, grace_s: float) -> bool:
        """Whether all that is missing went offline and did not come back within the grace."""
        if any(presence.is_online(name) for name in self.waiting_for()):
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
