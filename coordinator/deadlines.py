"""Until when a device's answer is waited for: as long as its work should take, and longer while it is on its way.

All times are seconds of this process's monotonic clock; a device is told how long it has from receipt.
"""

from dataclasses import dataclass

FLOOR_S = 30.0
"""No device is waited for less, before its first sign of life as after its newest."""
FIRST_S = 600.0
"""Until the first sign of life of a device of which nothing can be predicted."""
SLACK = 3.0
"""By how much a device may take longer than predicted, or be silent longer than it was before."""
SLOW_LINK_BYTES_PER_S = 125_000.0
"""1 Mb/s: where nothing was fetched from a device yet."""


@dataclass
class Deadline:
    """Of one device's task. `at` moves with its signs of life, never beyond `latest`."""

    at: float
    latest: float
    began: float
    predicted_s: float | None = None
    moves: bool = True
    told: float = 0.0  # until when the device was told to go on
    _sign_at: float | None = None
    _longest_gap_s: float = 0.0
    _first: tuple[float, int] | None = None  # when how many steps were done, by the first progress
    _done: int = 0

    @classmethod
    def fixed(cls, now: float, seconds: float, limit_s: float = 0.0) -> "Deadline":
        """A number that somebody chose: it does not move. A late result may come until `limit_s`."""
        return cls(now + seconds, now + max(seconds, limit_s), now, moves=False)

    @classmethod
    def expected(cls, now: float, limit_s: float, predicted_s: float | None) -> "Deadline":
        """As predicted, with slack; at most `limit_s`, however much the device is alive."""
        patience_s = FIRST_S if predicted_s is None else max(FLOOR_S, SLACK * predicted_s)
        return cls(now + min(limit_s, patience_s), now + limit_s, now, predicted_s)

    def sign(self, now: float) -> None:
        """Something of the device's work moved: a step, or bytes."""
        if self._sign_at is not None:
            self._longest_gap_s = max(self._longest_gap_s, now - self._sign_at)
        self._sign_at = now
        self._extend(now + max(FLOOR_S, SLACK * self._longest_gap_s))

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
            self.at = min(self.latest, now + max(FLOOR_S, SLACK * left_s))
        self.sign(now)

    def restart(self, now: float) -> None:
        """The device begins anew, in another process or over another link."""
        self._sign_at = self._first = None
        self._done = 0
        patience_s = FIRST_S if self.predicted_s is None else max(FLOOR_S, SLACK * self.predicted_s)
        self._extend(now + patience_s)

    def extension(self, now: float) -> float | None:
        """Seconds that the device should be told it has, once less than half of them are in what it was told."""
        left_s = self.at - now
        return left_s if left_s > 0 and self.told - now < left_s / 2 else None

    def _extend(self, until: float) -> None:
        if self.moves:
            self.at = min(self.latest, max(self.at, until))


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
