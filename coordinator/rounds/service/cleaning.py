"""Regular clean-ups of the folder that a service serves, by the policy of its runs."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.record.record import Record
from coordinator.record.retention import RetentionPolicy, collect
from fedvit.errors import FedvitError

log = logging.getLogger(__name__)


class Cleaner:
    """Does what `coordinator gc` does, every `every_h` hours and in a thread of its own; 0: never.

    It does not compact the record, which would keep runs from writing: the database uses the freed pages again.
    """

    def __init__(self, store: Record, out: Path, every_h: float, operator_log: Callable[[str], None]) -> None:
        self._store = store
        self._out = out
        self._every_s = 3600.0 * every_h
        self._operator_log = operator_log
        self._thread: threading.Thread | None = None
        self._begun_at: float | None = None
        self._stop = threading.Event()

    def watch(self) -> None:
        """Begin a clean-up if one is due."""
        now = time.monotonic()
        if not self._every_s or (self._begun_at is not None and now - self._begun_at < self._every_s):
            return
        if self._thread is None or not self._thread.is_alive():
            self._begun_at = now
            self._thread = threading.Thread(target=self._clean, name="gc", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End a clean-up that is under way after its current step."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _clean(self) -> None:
        freed, count = 0, 0
        try:
            self._store.database.check_leads()
            for entry in collect(self._store, self._out, RetentionPolicy(), report=self._operator_log):
                log.info("removed", extra={"what": entry.what, "path": entry.path, "bytes": entry.bytes})
                freed, count = freed + entry.bytes, count + 1
                if self._stop.is_set():
                    break
        except (FedvitError, OSError) as error:  # the next clean-up tries again
            log.warning("clean-up failed", extra={"reason": str(error)})
            self._operator_log(f"gc: {error}")
        if count:
            self._operator_log(f"gc: removed {count} things that are no longer needed ({freed / 1e6:.1f} MB)")
