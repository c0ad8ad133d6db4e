"""One question to a cohort, while it is being answered: devices that were asked, that answered, that are missing."""

import enum
import time
from collections.abc import Iterable, Mapping

from coordinator.run.presence import Presence
from coordinator.run.tasks import Work
from fedvit.wire.messages import Declined, Failed, Progress, Result, TaskKind


class Missing(enum.Enum):
    """Why a device brings nothing that counts in a round."""

    DEADLINE = "deadline"
    OFFLINE = "offline"
    DECLINED = "declined"  # no fault of the device
    FAILED = "failed"  # it cannot do the task, or its result was refused
    CRASHED = "crashed"  # its process ended at the task, again and again
    REVOKED = "revoked"


class OpenRound:
    """A round of training or of evaluation; nothing of it need be saved, for the store knows the cohort and results.

    In mode buffered its cohort grows, and holds those that are at work on tasks of earlier rounds, too.
    """

    def __init__(
        self,
        run: str,
        number: int,
        kind: TaskKind,
        cohort: Iterable[str],
        needed: int,
        work: Mapping[str, Work] | None = None,
        drawn: tuple[int, int] | None = None,
    ) -> None:
        self.run, self.number, self.kind = run, number, kind
        self.needed = needed  # results that close it at once
        self.work = dict(work or {})  # by device
        self.drawn = drawn  # devices that were free, and how many of them were drawn by this process
        self.opened_at = time.monotonic()
        self.cohort: set[str] = set()
        self.accepted: set[str] = set()
        self.failed: dict[str, Missing] = {}
        self._missing: dict[str, None] = {}  # an ordered set
        self._alone_since: float | None = None
        self.extend(cohort)

    def extend(self, devices: Iterable[str]) -> None:
        """More devices are asked."""
        for device in devices:
            if device not in self.cohort:
                self.cohort.add(device)
                if device not in self.accepted:
                    self._missing[device] = None

    def asked(self, message: Result | Failed | Declined | Progress) -> bool:
        """Whether the message is about this round."""
        return (message.run, message.round, message.kind) == (self.run, self.number, self.kind)

    def waiting_for(self) -> list[str]:
        return list(self._missing)

    def waits_for(self, device: str) -> bool:
        """Whether the device was asked and has not answered."""
        return device in self._missing

    def closes(self) -> bool:
        return len(self.accepted) >= self.needed or not self._missing

    def accept(self, device: str) -> None:
        self.accepted.add(device)
        self.failed.pop(device, None)
        self._missing.pop(device, None)

    def fail(self, device: str, why: Missing) -> None:
        """The device will not bring a result that counts."""
        if device in self._missing:
            del self._missing[device]
            self.failed[device] = why

    def declined(self) -> set[str]:
        """Devices that bring nothing, and are not to blame."""
        return {device for device, why in self.failed.items() if why is Missing.DECLINED}

    def given_up(self, presence: Presence, grace_s: float) -> bool:
        """Whether all that is missing went offline and did not come back within the grace."""
        return self.alone(not any(presence.is_online(name) for name in self._missing), grace_s)

    def alone(self, nobody: bool, grace_s: float) -> bool:
        """Whether it is true, and was for as long as the grace, that nobody is there who could bring anything."""
        now = time.monotonic()
        if not nobody:
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        return now - self._alone_since >= grace_s
