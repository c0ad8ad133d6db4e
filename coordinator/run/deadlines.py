"""Until when a device's answer is waited for: as long as its work should take, and longer while it is on its way.

All times are seconds of this process's monotonic clock; a device is told how long it has from receipt.
"""

import math
from dataclasses import dataclass

FLOOR_S = 30.0
"""No device is waited for less, before its first sign of life as after its newest."""
FIRST_S = 600.0
"""Until the first sign of life of a device of which nothing can be predicted."""
SLACK = 3.0
"""By how much a device may take longer than predicted, or be silent longer than it was before."""
SLOW_LINK_BYTES_PER_S = 125_000.0
"""1 Mb/s: where nothing was fetched from a device yet."""
SLOWEST_LINK_BYTES_PER_S = 4_000.0
"""32 kb/s, a chunk in half a minute: what moves more slowly holds the others up and does not count as moving."""
ALIVE = 10.0
"""A task ends after this multiple of its predicted time, and FIRST_S at the earliest, however alive the device is."""
UPLOAD_S = 120.0
"""An upload whose turn it is may be silent for so long before its bytes come; it takes the place of others."""


@dataclass
class Deadline:
    """Of one device's task. `at` moves with its signs of life, never beyond `latest`."""

    at: float
    latest: float
    began: float
    predicted_s: float | None = None
    moves: bool = True
    alive_until: float = math.inf  # signs of life move `at` no further; bytes that move and our own delays do
    upload_until: float = math.inf  # while its upload is being fetched: it must have moved on by then
    told: float = 0.0  # until when the device was told to go on
    _sign_at: float | None = None
    _longest_gap_s: float = 0.0
    _first: tuple[float, int] | None = None  # when how many steps were done, by the first progress
    _done: int = 0
    _back_since_sign: bool = False

    @classmethod
    def fixed(cls, now: float, seconds: float, limit_s: float = 0.0) -> "Deadline":
        """A number that somebody chose: it does not move. A late result may come until `limit_s`."""
        return cls(now + seconds, now + max(seconds, limit_s), now, moves=False)

    @classmethod
    def expected(cls, now: float, limit_s: float, predicted_s: float | None) -> "Deadline":
        """As predicted, with slack; at most `limit_s`, however much the device is alive."""
        deadline = cls(now, now + limit_s, now, predicted_s)
        deadline.at = now + min(limit_s, deadline._patience_s())
        if predicted_s is not None:
            deadline.alive_until = now + max(FIRST_S, ALIVE * predicted_s)
        return deadline

    def sign(self, now: float) -> None:
        """Something of the device's work moved: a step, or bytes."""
        self._back_since_sign = False
        if self._sign_at is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._sign_at)
        self._sign_at = now
        # bounded, since each silence would else allow one that is three times as long
        self._extend(now + max(FLOOR_S, min(FIRST_S, SLACK * self._longest_gap_s)))

    def moved(self, now: float, size: int) -> None:
        """Bytes arrived that were not there before: each gives the device the time that the slowest link needs."""
        self.alive_until += size / SLOWEST_LINK_BYTES_PER_S
        self.upload_until += size / SLOWEST_LINK_BYTES_PER_S
        self.sign(now)

    def waits(self, now: float) -> None:
        """It is this side that keeps the device waiting, which is no fault of the device."""
        self.interrupted()
        self.alive_until = max(self.alive_until, now + FIRST_S)
        self.sign(now)

    def fetching(self, now: float) -> None:
        """From now on it is the device's turn to upload, over a link that is there."""
        self.upload_until = now + UPLOAD_S

    def interrupted(self) -> None:
        """Nothing is fetched from the device any more, or nothing can come."""
        self.upload_until = math.inf

    def progressed(self, now: float, done: int, total: int) -> None:
        """The device says how far it is; only steps that were not said before are a sign of life."""
        if not self._done < done <= total:
            return
        self._done = done
        if self._first is None:
            self._first = (now, done)
        elif self.predicted_s is None and self.moves:
            first_at, first_done = self._first
            left_s = (now - first_at) / (done - first_done) * (total - done)
            # from here on this is the prediction, also where it is shorter than the first patience
            self.at = min(self.latest, now + max(FLOOR_S, min(FIRST_S, SLACK * left_s)))
        self.sign(now)

    def reconnected(self, now: float) -> None:
        """The device is back over another link, in the same process: it has a moment to say how far it is. A link that
        comes and goes gains nothing else by it."""
        if not self._back_since_sign:
            self._back_since_sign = True
            self._extend(now + FLOOR_S)

    def restart(self, now: float) -> None:
        """The device begins anew, in another process."""
        self._sign_at = self._first = None
        self._done = 0
        self._extend(now + self._patience_s())

    def extension(self, now: float) -> float | None:
        """Seconds that the device should be told it has, once less than half of them are in what it was told."""
        left_s = self.at - now
        return left_s if left_s > 0 and self.told - now < left_s / 2 else None

    def _patience_s(self) -> float:
        """Before the first sign of life."""
        return FIRST_S if self.predicted_s is None else max(FLOOR_S, SLACK * self.predicted_s)

    def _extend(self, until: float) -> None:
        if self.moves:
            self.at = max(self.at, min(self.latest, self.alive_until, until))


class Links:
    """How fast the link of each device is, by the results that were fetched from it."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def measured(self, device: str, size: int, seconds: float) -> None:
        """A result arrived. Half of what is known is the newest, so that one bad hour is forgotten."""
        rate = size / max(seconds, 1e-3)
        self._rates[device] = (self._rates.get(device, rate) + rate) / 2

    def seconds(self, device: str, size: int) -> float:
        return size / self._rates.get(device, SLOW_LINK_BYTES_PER_S)
