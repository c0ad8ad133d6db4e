"""A round: what is asked of whom, and how far it has been answered."""

import enum
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from coordinator.rounds.tasks import Work
from fedvit.wire.messages import Declined, Failed, Progress, Result, TaskKind


class Missing(enum.Enum):
    """Reason why a device returns nothing that counts in a round."""

    DEADLINE = "deadline"
    OFFLINE = "offline"
    DECLINED = "declined"  # not the device's fault
    FAILED = "failed"  # it cannot do the task, or its result was refused
    CRASHED = "crashed"  # its process ended repeatedly during the task
    REVOKED = "revoked"  # the device may not take part any more


class RoundPlan(NamedTuple):
    """The question of a round: what is asked of whom, and how many answers are enough."""

    run: str
    number: int
    kind: TaskKind
    cohort: list[str]
    needed: int  # results that close the round at once
    work: Mapping[str, Work] = {}  # by device
    drawn: tuple[int, int] | None = None  # number of free devices, and of those that this process drew


class OpenRound:
    """A round that is being answered. It need not be saved: the journal has its plan and results.

    In mode buffered its cohort grows, and includes devices that work on tasks of earlier rounds.
    """

    def __init__(self, plan: RoundPlan) -> None:
        self.run, self.number, self.kind = plan.run, plan.number, plan.kind
        self.needed, self.drawn = plan.needed, plan.drawn
        self.work = dict(plan.work)
        self.opened_at = time.monotonic()
        self.cohort: set[str] = set()
        self.accepted: set[str] = set()
        self.failed: dict[str, Missing] = {}
        self._missing: dict[str, None] = {}  # used as an ordered set
        self._abandoned_since: float | None = None
        self.extend(plan.cohort)

    def extend(self, devices: Iterable[str]) -> None:
        """Add devices to the cohort."""
        for device in devices:
            if device not in self.cohort:
                self.cohort.add(device)
                if device not in self.accepted:
                    self._missing[device] = None

    def asked(self, message: Result | Failed | Declined | Progress) -> bool:
        """Return whether the message is about this round."""
        return (message.run, message.round, message.kind) == (self.run, self.number, self.kind)

    def waiting_for(self) -> list[str]:
        return list(self._missing)

    def waits_for(self, device: str) -> bool:
        """Return whether the device was asked and has not answered."""
        return device in self._missing

    def closes(self) -> bool:
        return len(self.accepted) >= self.needed or not self._missing

    def accept(self, device: str) -> None:
        self.accepted.add(device)
        self.failed.pop(device, None)
        self._missing.pop(device, None)

    def fail(self, device: str, why: Missing) -> None:
        """Note that the device will not return a result that counts."""
        if device in self._missing:
            del self._missing[device]
            self.failed[device] = why

    def declined(self) -> set[str]:
        """Devices that declined."""
        return {device for device, why in self.failed.items() if why is Missing.DECLINED}

    def is_given_up(self, is_online: Callable[[str], bool], grace_s: float) -> bool:
        """Return whether all missing devices are offline and have not returned within the grace period."""
        return self.is_abandoned(not any(map(is_online, self._missing)), grace_s)

    def is_abandoned(self, nobody_online: bool, grace_s: float) -> bool:
        """Return whether no device that could answer has been online for the whole grace period."""
        now = time.monotonic()
        if not nobody_online:
            self._abandoned_since = None
            return False
        if self._abandoned_since is None:
            self._abandoned_since = now
        return now - self._abandoned_since >= grace_s
