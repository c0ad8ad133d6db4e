"""Publishes of one connection, spaced evenly, for brokers that end a connection which publishes too often."""

import time

SHARE = 0.9
"""Share of the broker's limit: its clock and the network see messages closer together."""
CATCH_UP_S = 0.1
"""A thread that woke up late makes up for this time at most."""


class Pace:
    """At most `per_s` publishes a second; 0: any number. For one thread, or under the lock of its connection."""

    def __init__(self, per_s: int = 0) -> None:
        self.per_s = per_s
        self._next_at = 0.0  # on the monotonic clock

    def take(self) -> bool:
        """Return whether a message may be published now, and count it if it may."""
        if not self.per_s:
            return True
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = max(self._next_at, now - CATCH_UP_S) + 1 / (SHARE * self.per_s)
        return True

    def wait_s(self) -> float:
        """Seconds until the next message may be published."""
        return max(0.0, self._next_at - time.monotonic()) if self.per_s else 0.0
