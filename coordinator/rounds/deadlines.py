"""Deadlines of a device's answer: the predicted time of its task, extended while the device makes progress.

All times are seconds of this process's monotonic clock; a device receives the time from now on that it has left.
"""

import math
from dataclasses import dataclass

FLOOR_S = 30.0
"""Shortest wait for a device, both before its first sign of life and after its newest."""
FIRST_S = 600.0
"""Wait for the first sign of life of a device without a prediction."""
SLACK = 3.0
"""Factor by which a device may exceed its predicted time, or its longest silence so far."""
SLOW_LINK_BYTES_PER_S = 125_000.0
"""1 Mb/s: assumed until something was fetched from a device."""
SLOWEST_LINK_BYTES_PER_S = 4_000.0
"""32 kb/s, a chunk in half a minute: slower transfers delay the others and do not count as progress."""
ALIVE = 10.0
"""A task ends after this multiple of its predicted time (at least FIRST_S), even if the device shows signs of life."""
UPLOAD_S = 120.0
"""Longest silence of an upload before its first bytes: it occupies one of the few upload slots."""


@dataclass
class Deadline:
    """The deadline of one task. Signs of life extend `at`, never beyond `latest`."""

    at: float
    latest: float
    began: float
    predicted_s: float | None = None
    is_extendable: bool = True
    alive_until: float = math.inf  # limit for signs of life; received bytes and our own delays extend it
    upload_until: float = math.inf  # while its upload is fetched: the next bytes must come before this
    announced: float = 0.0  # the deadline that was last sent to the device
    _sign_at: float | None = None
    _longest_gap_s: float = 0.0
    _first: tuple[float, int] | None = None  # time and steps of the first progress report
    _done: int = 0
    _reconnected_since_sign: bool = False
    _left_since_sign: bool = False

    @classmethod
    def fixed(cls, now: float, seconds: float, limit_s: float = 0.0) -> "Deadline":
        """A configured number of seconds, which is never extended. A late result may come until `limit_s`."""
        return cls(now + seconds, now + max(seconds, limit_s), now, is_extendable=False)

    @classmethod
    def expected(cls, now: float, limit_s: float, predicted_s: float | None) -> "Deadline":
        """The predicted time with slack; signs of life extend it to at most `limit_s`."""
        deadline = cls(now, now + limit_s, now, predicted_s)
        deadline.at = now + min(limit_s, deadline._initial_wait_s())
        if predicted_s is not None:
            deadline.alive_until = now + max(FIRST_S, ALIVE * predicted_s)
        return deadline

    def sign(self, now: float) -> None:
        """A sign of life: a new step, or new bytes."""
        self._reconnected_since_sign = self._left_since_sign = False
        if self._sign_at is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._sign_at)
        self._sign_at = now
        # bounded, since otherwise each silence would allow one three times as long
        self._extend(now + max(FLOOR_S, min(FIRST_S, SLACK * self._longest_gap_s)))

    def received(self, now: float, size: int) -> None:
        """New bytes arrived: each byte extends the limits by the time that the slowest accepted link needs."""
        self.alive_until += size / SLOWEST_LINK_BYTES_PER_S
        self.upload_until += size / SLOWEST_LINK_BYTES_PER_S
        self.sign(now)

    def kept_waiting(self, now: float) -> None:
        """This side keeps the device waiting, which must not count against it."""
        self.interrupted()
        self.alive_until = max(self.alive_until, now + FIRST_S)
        self._sign_at = None  # its silence until now was not its own
        self.sign(now)

    def delayed(self, seconds: float) -> None:
        """This side sent the task so much later than it was assigned."""
        self.began += seconds
        self.at += seconds
        self.latest += seconds
        self.alive_until += seconds

    def fetching(self, now: float) -> None:
        """The upload of the device begins now, over a working link."""
        self.upload_until = now + UPLOAD_S

    def interrupted(self) -> None:
        """The upload has ended, or the link is down."""
        self.upload_until = math.inf

    def progressed(self, now: float, done: int, total: int) -> None:
        """The device reports its progress; only new steps count as a sign of life."""
        if not self._done < done <= total:
            return
        self._done = done
        if self._first is None:
            self._first = (now, done)
        elif self.predicted_s is None and self.is_extendable:
            first_at, first_done = self._first
            remaining_s = (now - first_at) / (done - first_done) * (total - done)
            # replaces the initial wait, also if it is shorter
            self.at = min(self.latest, now + max(FLOOR_S, min(FIRST_S, SLACK * remaining_s)))
        self.sign(now)

    def note_left(self, now: float, grace_s: float) -> None:
        """The device went offline: it may return within the grace period, once per sign of life, so that an unstable
        link gains no time."""
        if not self._left_since_sign:
            self._left_since_sign = True
            self._extend(now + grace_s)

    def reconnected(self, now: float) -> None:
        """The same process reconnected: it gets a short time to report its progress, once per sign of life, so that an
        unstable link gains no time."""
        if not self._reconnected_since_sign:
            self._reconnected_since_sign = True
            self._extend(now + FLOOR_S)

    def restart(self, now: float) -> None:
        """Another process of the device starts the task from the beginning."""
        self._sign_at = self._first = None
        self._left_since_sign = False
        self._done = 0
        self._extend(now + self._initial_wait_s())

    def extension(self, now: float) -> float | None:
        """Seconds left to send to the device, if it knows of less than half of them; otherwise None."""
        remaining_s = self.at - now
        return remaining_s if remaining_s > 0 and self.announced - now < remaining_s / 2 else None

    def _initial_wait_s(self) -> float:
        """Wait for the first sign of life."""
        return FIRST_S if self.predicted_s is None else max(FLOOR_S, SLACK * self.predicted_s)

    def _extend(self, until: float) -> None:
        if self.is_extendable:
            self.at = max(self.at, min(self.latest, self.alive_until, until))


class Links:
    """The speed of each device's link, measured by its uploads."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def measured(self, device: str, size: int, seconds: float) -> None:
        """An upload arrived. It weighs half of the average, so that a slow hour is soon forgotten."""
        rate = size / max(seconds, 1e-3)
        self._rates[device] = (self._rates.get(device, rate) + rate) / 2

    def seconds(self, device: str, size: int) -> float:
        return size / self._rates.get(device, SLOW_LINK_BYTES_PER_S)
