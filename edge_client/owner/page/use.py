"""Sums of what left the device today, read from the ledger again only when that has changed."""

import time
from datetime import datetime
from typing import NamedTuple

from edge_client.storage.ledger import DAY_S, LEDGER_FILE, OLD_FILE, Ledger, Sent, midnight_s, sum_lines

FRESH_S = 60.0
"""Time after which the sums are made again: lines leave the last 24 hours."""


class Use(NamedTuple):
    """The ledger's sums."""

    today: Sent
    bytes_of_24_hours: int  # of results, which `max_bytes_per_day` limits


class LedgerUse:
    """The sums of a ledger, which may have 8 MB."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._known: tuple[object, Use] | None = None  # by the state of the files

    def read(self) -> Use:
        """Return the sums of now."""
        key = (self._stamp(), datetime.now().date(), int(time.time() / FRESH_S))
        if self._known is None or self._known[0] != key:
            today_s, since_s = midnight_s(), time.time() - DAY_S
            lines = list(self.ledger.read(min(today_s, since_s)))
            sent = sum_lines(line for line in lines if line.time_s >= today_s)
            size = sum(line.bytes for line in lines if line.key and line.time_s >= since_s)
            self._known = (key, Use(sent, size))
        return self._known[1]

    def _stamp(self) -> list[tuple[int, int] | None]:
        stamps: list[tuple[int, int] | None] = []
        for name in (OLD_FILE, LEDGER_FILE):
            try:
                status = (self.ledger.folder / name).stat()
            except FileNotFoundError:
                stamps.append(None)
            else:
                stamps.append((status.st_size, status.st_mtime_ns))
        return stamps
