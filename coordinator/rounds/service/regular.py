"""Regular work of a service beside its runs: clean-ups of its folder by the policy of its runs, and backups."""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.record.record import Record
from coordinator.record.retention import RetentionPolicy, collect

log = logging.getLogger(__name__)

Work = Callable[[threading.Event], str]
"""Does something until the event is set, and returns a line for the operator; "": nothing to say."""


class RegularWork:
    """Does its work at the start and then every `every_h` hours, in a thread of its own; 0: never."""

    def __init__(self, name: str, every_h: float, work: Work, operator_log: Callable[[str], None]) -> None:
        self._name = name
        self._every_s = 3600.0 * every_h
        self._work = work
        self._operator_log = operator_log
        self._thread: threading.Thread | None = None
        self._begun_at: float | None = None
        self._stop = threading.Event()

    def watch(self) -> None:
        """Begin the work if it is due."""
        now = time.monotonic()
        if not self._every_s or (self._begun_at is not None and now - self._begun_at < self._every_s):
            return
        if self._thread is None or not self._thread.is_alive():
            self._begun_at = now
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End work that is under way after its current step."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            line = self._work(self._stop)
        except Exception as error:  # the service goes on, and tries again when it is due
            log.warning("regular work failed", extra={"work": self._name, "reason": str(error)}, exc_info=error)
            line = str(error) or type(error).__name__
        if line:
            self._operator_log(f"{self._name}: {line}")


class CleanUps:
    """Clean-ups of a folder of runs; `age_s` and `freed_bytes` may be read from any thread."""

    def __init__(self, store: Record, out: Path, operator_log: Callable[[str], None]) -> None:
        self.freed_bytes = 0  # by all of this process
        self._store = store
        self._out = out
        self._operator_log = operator_log
        self._done_at = -math.inf

    def age_s(self) -> float:
        """Return the time since the newest complete clean-up, infinite if there is none."""
        return time.monotonic() - self._done_at

    def clean(self, stop: threading.Event) -> str:
        """Do what `coordinator gc` does for a folder of runs.

        It does not compact the record, which would keep runs from writing: the database uses the freed pages again.
        """
        self._store.database.check_leads()
        freed, count = 0, 0
        for entry in collect(self._store, self._out, RetentionPolicy(), report=self._operator_log):
            log.info("removed", extra={"what": entry.what, "path": entry.path, "bytes": entry.bytes})
            freed, count = freed + entry.bytes, count + 1
            self.freed_bytes += entry.bytes
            if stop.is_set():
                break
        else:
            self._done_at = time.monotonic()
        return f"removed {count} things that are no longer needed ({freed / 1e6:.1f} MB)" if count else ""
