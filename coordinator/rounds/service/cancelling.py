"""The look for a request to cancel a run that is being served."""

import time

from coordinator.record.record import Record

EVERY_S = 1.0


class Cancellation:
    """Reads the record about once a second, however often it is called."""

    def __init__(self, store: Record, run: str) -> None:
        self._store = store
        self._run = run
        self._looked_at = time.monotonic()

    def is_asked_for(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return False
        self._looked_at = now
        return self._store.runs.is_cancelled(self._run)
