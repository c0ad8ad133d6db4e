"""Durations of repeated work, and signs that a loop still turns; for metrics and watchdogs."""

import threading
import time
from collections.abc import Callable

RECENT_S = 60.0
Clock = Callable[[], float]


class Timings:
    """Count, sum and recent maximum of durations. May be used from any thread."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.count = 0
        self.total_s = 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._longest_before_s = self._longest_s = 0.0  # of the previous interval of RECENT_S, and of this one
        self._interval = 0

    def add(self, seconds: float) -> None:
        with self._lock:
            self.count += 1
            self.total_s += seconds
            self._advance()
            self._longest_s = max(self._longest_s, seconds)

    def longest_s(self) -> float:
        """The longest duration of the last one to two RECENT_S; 0 if there was none."""
        with self._lock:
            self._advance()
            return max(self._longest_before_s, self._longest_s)

    def _advance(self) -> None:
        interval = int(self._clock() // RECENT_S)
        if interval != self._interval:
            self._longest_before_s = self._longest_s if interval == self._interval + 1 else 0.0
            self._longest_s, self._interval = 0.0, interval


class LoopWatch:
    """Watches a loop whose turn should take at most `expected_s` seconds, waiting included.

    The loop calls `turned` at each turn, which calls `on_turn`; other threads may read the rest.
    """

    def __init__(
        self, expected_s: float, on_turn: Callable[[], None] = lambda: None, clock: Clock = time.monotonic
    ) -> None:
        self.delays = Timings(clock)  # by which turns took longer
        self._expected_s = expected_s
        self._on_turn = on_turn
        self._clock = clock
        self._turned_at = clock()

    def turn(self) -> None:
        now = self._clock()
        self.delays.add(max(0.0, now - self._turned_at - self._expected_s))
        self._turned_at = now
        self._on_turn()

    def silent_s(self) -> float:
        """Time since the last turn."""
        return self._clock() - self._turned_at
