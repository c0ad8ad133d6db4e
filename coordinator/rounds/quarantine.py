"""Strikes and quarantine of devices that sent invalid results or floods.

A result that is refused or far out of scale can cause a strike, and so can a flood of messages. A device that is late,
offline, out of memory or over budget gets none. Everything is in the store, so that it survives a restart, and a
release by the operator in another process takes effect at once.
"""

import logging
from collections.abc import Iterable

from coordinator.config import RobustConfig
from coordinator.record.record import Record
from coordinator.record.tables import QuarantineRecord
from fedvit.hints import command

log = logging.getLogger(__name__)


class Quarantine:
    """The quarantines of one run, with the limits of its table [robust].

    A device gets at most one strike per round, so that work that is repeated after a restart does not count twice.
    """

    def __init__(self, run: str, store: Record, robust: RobustConfig) -> None:
        self._run = run
        self._store = store
        self._limit = robust.strikes  # strikes that lead to quarantine; 0: never
        self._rounds = robust.quarantine_rounds  # None: until the operator releases it

    def strike(self, device: str, round_number: int, reason: str) -> bool:
        """Record a strike; True if it puts the device into quarantine."""
        if not self._limit:
            return False
        count = self._store.strikes.add(self._run, round_number, device, reason)
        log.warning("strike", extra={"device": device, "round": round_number, "count": count, "reason": reason})
        if count < self._limit or self.record_of(device, round_number):
            return False
        until = None if self._rounds is None else round_number + self._rounds
        strikes = f"{count} strike{'s' if count > 1 else ''}, the last: {reason}"
        self._store.strikes.add_quarantine(self._run, device, round_number, until, strikes)
        return True

    def record_of(self, device: str, round_number: int) -> QuarantineRecord | None:
        """The quarantine that excludes a device from a round; None if there is none."""
        return self._now(round_number).get(device)

    def why_not(self, device: str, round_number: int) -> str | None:
        """The reason, for its owner, why a device is not asked in a round; None if it may be asked."""
        record = self.record_of(device, round_number)
        return None if record is None else self.reason(record)

    def reason(self, record: QuarantineRecord) -> str:
        """Return the reason for the owner why a device in quarantine is not asked."""
        release = command("coordinator", "quarantine", self._run, "--release", record.device)
        return f"quarantine {_how_long(record.until_round)}: {record.reason}; the operator ends it with: {release}"

    def admitted(self, devices: Iterable[str], round_number: int) -> list[str]:
        """Devices that may be asked in a round."""
        quarantined = self._now(round_number)
        return [device for device in devices if device not in quarantined]

    def _now(self, round_number: int) -> dict[str, QuarantineRecord]:
        return self._store.strikes.read_current_quarantines(self._run, round_number) if self._limit else {}


def _how_long(until_round: int | None) -> str:
    return "until it is released" if until_round is None else f"until round {until_round} is over"
