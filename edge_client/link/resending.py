"""When a message that nobody has answered is sent again."""

import random
import time

AGAIN_S = 5.0
"""A hello, or the answer to a task, is sent again after about this time without an acknowledgement; the wait doubles,
up to AGAIN_MAX_S."""
AGAIN_MAX_S = 60.0


class Resend:
    """When to send an unanswered message again: with jitter, after waits that double."""

    def __init__(self, least_s: float = 0.0, most_s: float | None = None) -> None:
        self._began = time.monotonic()
        self._most_s = AGAIN_MAX_S if most_s is None else most_s
        self._wait_s = max(AGAIN_S, least_s) if most_s is None else min(least_s, most_s)
        self._due = self._began + self._wait_s

    def is_overdue(self) -> bool:
        """Return True if an answer should have come by now, however often it was asked for since."""
        return time.monotonic() >= self._began + AGAIN_S

    def due(self) -> bool:
        if time.monotonic() < self._due:
            return False
        self._wait_s = min(self._most_s, 2 * self._wait_s)
        self._due = time.monotonic() + self._wait_s * random.uniform(0.75, 1.25)
        return True

    def hasten(self, within_s: float) -> None:
        """Become due at a random time within the next `within_s` seconds."""
        self._due = min(self._due, time.monotonic() + random.uniform(0.0, within_s))
