"""Backoff of reconnections: waits grow with each failure, and have jitter so that a fleet does not return at once."""

import random

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0
SETTLED_S = 10.0
"""After a link that was up for this long, the waits start with the shortest one again."""


class Backoff:
    """The waits of one connection. After the loss of a link that was up, up to `spread_s` seconds are added.

    When a broker ends, a whole fleet loses its links at once; the spread is the time over which the fleet reconnects.
    """

    def __init__(self, spread_s: float = 0.0) -> None:
        self.spread_s = spread_s
        self._failures = 0

    def wait_s(self, up_s: float | None) -> float:
        """Seconds until the next attempt; `up_s` is how long the link that ended was up, None if it never was."""
        if up_s is not None and up_s > SETTLED_S:
            self._failures = 0
        shortest_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        spread_s = 0.0 if up_s is None else random.uniform(0.0, self.spread_s)
        return shortest_s * random.uniform(0.5, 1.5) + spread_s
