"""One question to a cohort, while it is being answered: who was asked, who answered, who is missing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.run.display import DeviceLine
from coordinator.run.presence import Presence
from coordinator.run.tasks import Assignments, Work
from fedvit.wire.messages import Declined, Failed, Progress, Result, TaskKind


@dataclass
class OpenRound:
    """A round of training or of evaluation; nothing of it need be saved, for the store knows the cohort and results.

    In mode buffered its cohort grows, and holds those that are at work on tasks of earlier rounds, too.
    """

    run: str
    number: int
    kind: TaskKind
    cohort: list[str]
    needed: int  # results that close it at once
    work: dict[str, Work] = field(default_factory=dict)  # by device
    drawn: tuple[int, int] | None = None  # devices that were free, and how many of them were drawn by this process
    opened_at: float = field(default_factory=time.monotonic)
    accepted: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)  # device -> why it brings nothing that counts
    declined: set[str] = field(default_factory=set)  # of these, those that are not to blame
    _alone_since: float | None = None

    def asked(self, message: Result | Failed | Declined | Progress) -> bool:
        """Whether the message is about this round."""
        return (message.run, message.round, message.kind) == (self.run, self.number, self.kind)

    def waiting_for(self) -> list[str]:
        return list(self._missing())

    def waits_for(self, device: str) -> bool:
        """Whether the device was asked and has not answered."""
        return device not in self.accepted and device not in self.failed and device in self.cohort

    def _missing(self) -> Iterator[str]:
        return (name for name in self.cohort if name not in self.accepted and name not in self.failed)

    def closes(self) -> bool:
        return len(self.accepted) >= self.needed or not any(self._missing())

    def accept(self, device: str) -> None:
        self.accepted.add(device)
        self.failed.pop(device, None)

    def fail(self, device: str, reason: str) -> None:
        """The device will not bring a result that counts."""
        if self.waits_for(device):
            self.failed[device] = reason

    def given_up(self, presence: Presence, grace_s: float) -> bool:
        """Whether all that is missing went offline and did not come back within the grace."""
        return self.alone(not any(presence.is_online(name) for name in self._missing()), grace_s)

    def alone(self, nobody: bool, grace_s: float) -> bool:
        """Whether it is true, and was for as long as the grace, that nobody is there who could bring anything."""
        now = time.monotonic()
        if not nobody:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since >= grace_s

    def lines(self, presence: Presence, assignments: Assignments, uploading: set[str]) -> list[DeviceLine]:
        """What each device of the cohort is doing."""
        lines = []
        for device in self.cohort:
            assignment = assignments.of(device)
            known = assignment.progress if assignment else None
            if device in self.accepted:
                state = "done"
            elif device in self.failed:
                state = "declined" if device in self.declined else "failed"
            elif device in uploading:
                state = "uploading"
            elif not presence.is_online(device):
                state = "offline"
            else:
                state = self.kind if known else "fetching"
            done, total = (known.done_steps, known.total_steps) if known else (0, 1)
            lines.append(DeviceLine(device, state, done, total, known.loss if known else None))
        return lines
