"""A round that is open: which devices were asked, have answered, or are missing."""

import enum
import time
from collections.abc import Iterable, Mapping

from coordinator.rounds.presence import Presence
from coordinator.rounds.tasks import Work
from fedvit.wire.messages import Declined, Failed, Progress, Result, TaskKind


class Missing(enum.Enum):
    """Why a device returns nothing that counts in a round."""

    DEADLINE = "deadline"
    OFFLINE = "offline"
    DECLINED = "declined"  # not the device's fault
    FAILED = "failed"  # it cannot do the task, or its result was refused
    CRASHED = "crashed"  # its process ended repeatedly during the task
    REVOKED = "revoked"  # the device may not take part any more


class OpenRound:
    """A round of training or evaluation. It need not be saved: the store has its cohort and results.

    In mode buffered its cohort grows, and includes devices that work on tasks of earlier rounds.
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
        self.drawn = drawn  # number of free devices, and of those that this process drew
        self.opened_at = time.monotonic()
        self.cohort: set[str] = set()
        self.accepted: set[str] = set()
        self.failed: dict[str, Missing] = {}
        self._missing: dict[str, None] = {}  # used as an ordered set
        self._abandoned_since: float | None = None
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
        """The device will not return a result that counts."""
        if device in self._missing:
            del self._missing[device]
            self.failed[device] = why

    def declined(self) -> set[str]:
        """Devices that declined."""
        return {device for device, why in self.failed.items() if why is Missing.DECLINED}

    def given_up(self, presence: Presence, grace_s: float) -> bool:
        """Whether all missing devices are offline and have not returned within the grace period."""
        return self.abandoned(not any(presence.is_online(name) for name in self._missing), grace_s)

    def abandoned(self, nobody_online: bool, grace_s: float) -> bool:
        """Whether no device that could answer has been online for the whole grace period."""
        now = time.monotonic()
        if not nobody_online:
            self._abandoned_since = None
            return False
        if self._abandoned_since is None:
            self._abandoned_since = now
        return now - self._abandoned_since >= grace_s
