"""Requests to cancel a run, in the record."""

import time
from pathlib import Path

from coordinator.record.record import Record
from coordinator.record.retention import is_served
from fedvit.errors import ConfigError

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


def cancel(store: Record, folder: Path, run: str) -> str:
    """Cancel a run: at once if it is queued or was killed, within seconds if it is being served. `folder` is that of
    all runs. Returns what happens. Raises ConfigError if there is no such run, or if it has ended."""
    record = store.runs.read(run)
    if record.status in ("finished", "failed", "cancelled"):
        raise ConfigError("FV1612", f"run {run!r} is {record.status} already")
    with store.database.together():
        store.runs.cancel(run)
        store.audit.add("cancel", run)
    if not is_served(folder / run) and store.runs.read(run).status != "cancelled":  # its process was killed
        store.runs.update(run, status="cancelled")
    return "cancelled" if store.runs.read(run).status == "cancelled" else "its coordinator ends it now"
