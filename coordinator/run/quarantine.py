"""Devices that sent what no honest one sends: their strikes, and how long they are not asked.

Only what a device says about its own work can be a strike: a result that is refused, or that is far out of scale.
To be late, offline, out of memory or over budget is no fault. Everything is in the store, so that a restart forgives
nothing, and an operator's release in another process is heard at once.
"""

import logging
from collections.abc import Iterable

from coordinator.config import RobustConfig
from coordinator.record.store import Store
from coordinator.record.tables import QuarantineRecord

log = logging.getLogger(__name__)


class Quarantine:
    """One run's, with the limits of its table [robust].

    A device gets one strike a round at most, so that work which is done again after a restart counts nothing twice.
    """

    def __init__(self, run: str, store: Store, robust: RobustConfig) -> None:
        self._run = run
        self._store = store
        self._limit = robust.strikes  # the last of them puts a device into quarantine; 0 counts none
        self._rounds = robust.quarantine_rounds  # None: until the operator says otherwise

    def strike(self, device: str, round_number: int, reason: str) -> bool:
        """Count a fault; True where it is the one too many, which puts the device into quarantine."""
        if not self._limit:
            return False
        count = self._store.add_strike(self._run, round_number, device, reason)
        log.warning("strike", extra={"device": device, "round": round_number, "count": count, "reason": reason})
        if count < self._limit or self.record_of(device, round_number):
            return False
        until = None if self._rounds is None else round_number + self._rounds
        strikes = f"{count} strike{'s' if count > 1 else ''}, the last: {reason}"
        self._store.add_quarantine(self._run, device, round_number, until, strikes)
        return True

    def record_of(self, device: str, round_number: int) -> QuarantineRecord | None:
        """The quarantine that keeps a device out of a round."""
        return self._now(round_number).get(device)

    def why_not(self, device: str, round_number: int) -> str | None:
        """Why a device is not asked in a round, for its owner; None where it is."""
        record = self.record_of(device, round_number)
        if record is None:
            return None
        release = f"; the operator ends it with: coordinator quarantine {self._run} --release {device}"
        return f"quarantine {_how_long(record.until_round)}: {record.reason}{release}"

    def admitted(self, devices: Iterable[str], round_number: int) -> list[str]:
        """Those that may be asked in a round."""
        kept_out = self._now(round_number)
        return [device for device in devices if device not in kept_out]

    def _now(self, round_number: int) -> dict[str, QuarantineRecord]:
        return self._store.quarantined(self._run, round_number) if self._limit else {}


def _how_long(until_round: int | None) -> str:
    return "until it is released" if until_round is None else f"until round {until_round} is over"
