"""Requests to cancel a run, in the record."""

import time
from pathlib import Path

from coordinator.record.retention import is_served
from coordinator.record.store import Store
from fedvit.errors import ConfigError

EVERY_S = 1.0


class Cancellation:
    """Reads the record about once a second, however often it is called."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._looked_at = time.monotonic()

    def is_asked_for(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < EVERY_S:
            return False
        self._looked_at = now
        return self._store.is_cancelled(self._run)


def cancel(store: Store, folder: Path, run: str) -> str:
    """Cancel a run: at once if it is queued or was killed, within seconds if it is being served. `folder` is that of
    all runs. Returns what happens. Raises ConfigError if there is no such run, or if it has ended."""
    record = store.run(run)
    if record.status in ("finished", "failed", "cancelled"):
        raise ConfigError(f"run {run!r} is {record.status} already")
    store.cancel_run(run)
    if not is_served(folder / run) and store.run(run).status != "cancelled":  # its process was killed
        store.update_run(run, status="cancelled")
    return "cancelled" if store.run(run).status == "cancelled" else "its coordinator ends it now"
