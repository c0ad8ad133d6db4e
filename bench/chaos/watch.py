"""Observes a federation from outside: progress, standstills, memory."""

import threading
import time
from typing import NamedTuple

import psutil
from msgspec import Struct

from bench.chaos.federation import Federation

EVERY_S = 0.25


class Memory(Struct):
    """Resident bytes of one process and its successors."""

    start: int
    end: int
    peak: int


class Moment(NamedTuple):
    """An event in the picture of a scenario."""

    at_s: float
    target: str
    sign: str


class Watch:
    """Samples a federation from its own thread; use as a context manager.

    Times are those at which this process sees a change, since the programs' clocks may be wrong.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.began = time.monotonic()
        self.memory: dict[str, Memory] = {}
        self.moments: list[Moment] = []
        self.longest_standstill_s = 0.0
        self._seen = (0, 0)
        self._changed_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    def complete_rounds(self) -> int:
        """Rounds so far, of all runs, in which every device's result was accepted."""
        sql = "select count(*) from rounds where closed_at is not null and json_extract(figures, '$.accepted') = ?"
        found = self.federation.query(sql, float(len(self.federation.devices)))
        return int(found[0][0]) if found else 0

    def note(self, target: str, sign: str) -> None:
        self.moments.append(Moment(self.now_s, target, sign))

    def _sample(self) -> None:
        while not self._stop.wait(EVERY_S):
            progress = self._progress()
            for name, pid in self.federation.pids().items():
                try:
                    rss_bytes = psutil.Process(pid).memory_info().rss
                except psutil.Error:
                    continue
                known = self.memory.setdefault(name, Memory(rss_bytes, rss_bytes, rss_bytes))
                known.peak = max(known.peak, rss_bytes)
                if progress:  # otherwise it may be a new process that is starting
                    known.end = rss_bytes
                    known.start = known.start if self._seen[0] > 1 else rss_bytes

    def _progress(self) -> bool:
        """Whether a round has closed since the last sample."""
        found = self.federation.query(
            "select (select count(*) from rounds where closed_at is not null), (select count(*) from results)"
        )
        seen = (int(found[0][0]), int(found[0][1])) if found else (0, 0)
        now, closed = time.monotonic(), seen[0] > self._seen[0]
        if closed:
            self.note("rounds", "|")
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        if self._seen[1]:  # before the first result, devices are starting
            self.longest_standstill_s = max(self.longest_standstill_s, now - self._changed_at)
        return closed
