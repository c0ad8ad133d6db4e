"""Accuracy against what it cost: rounds, bytes, FLOPs, seconds."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct


class Accuracy(Struct, frozen=True, kw_only=True):
    """Over all devices, in one evaluation."""

    mean: float  # over devices, unweighted
    std_over_devices: float  # population
    weighted: float  # over test images


class RoundFigures(Struct, frozen=True, kw_only=True):
    """One round of an experiment's cell; bytes and FLOPs are means over the devices that trained in it."""

    round: int
    cohort: int
    accepted: int
    accuracy: Accuracy | None  # None: not evaluated in this round
    train_loss: float | None
    bytes_down: float | None  # evaluation included
    bytes_up: float | None
    flops: float | None  # training alone
    took_s: float | None = None  # from the first task to the end of the server's step
    longest_s: float | None = None  # of the device that trained longest; None: not measured

    @property
    def point(self) -> "Point":
        megabytes = ((self.bytes_down or 0.0) + (self.bytes_up or 0.0)) * self.accepted / 1e6
        accuracy = self.accuracy.mean if self.accuracy else None
        return Point(self.round, accuracy, megabytes, (self.flops or 0.0) * self.accepted / 1e12, self.took_s)


class Point(NamedTuple):
    """The end of a round; costs are those of all devices."""

    round: int
    accuracy: float | None  # mean over devices; None: not evaluated
    megabytes: float  # down and up
    teraflop: float
    seconds: float | None  # None: not recorded


COSTS: dict[str, Callable[[Point], float | None]] = {
    "round": lambda point: point.round,
    "MB down and up, all devices": lambda point: point.megabytes,
    "TFLOP of training, all devices": lambda point: point.teraflop,
    "seconds of rounds": lambda point: point.seconds,
}
"""By the name of their axis."""


def add_up(rounds: Iterable[Point]) -> list[Point]:
    """Points of single rounds, with the costs of all rounds before."""

    def add(before: Point, own: Point) -> Point:
        seconds = None if before.seconds is None or own.seconds is None else before.seconds + own.seconds
        return own._replace(
            megabytes=before.megabytes + own.megabytes, teraflop=before.teraflop + own.teraflop, seconds=seconds
        )

    return list(accumulate(rounds, add))


def mean_over_seeds(runs: Sequence[Sequence[Point]]) -> list[Point]:
    """Means over the rounds that all runs have."""
    return [
        Point(
            points[0].round,
            _mean([point.accuracy for point in points]),
            fmean(point.megabytes for point in points),
            fmean(point.teraflop for point in points),
            _mean([point.seconds for point in points]),
        )
        for points in zip(*runs, strict=False)
    ]


def curve(points: Iterable[Point], cost: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    """Accuracy against a cost, of the rounds that were evaluated and have it."""
    pairs = ((cost(point), point.accuracy) for point in points)
    return [(at, accuracy) for at, accuracy in pairs if at is not None and accuracy is not None]


def _mean(values: list[float | None]) -> float | None:
    """None where a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
