"""Two models on the same test images: how many each of them answers right, and what follows for their difference."""

import math
from typing import Annotated

from msgspec import Meta, Struct

Images = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Z = 1.959963984540054
"""Half the width of a 95 % interval, in standard deviations."""
_PAIRED = ("both", "challenger", "champion", "neither")
_ALONE = ("challenger", "neither")


class ScoreInterval(Struct, frozen=True):
    """A 95 % confidence interval."""

    low: float
    high: float


class Comparison(Struct, frozen=True):
    """Numbers of test images by who answers them right. Without a champion, all answers are the challenger's alone."""

    both: Images = 0
    only_challenger: Images = 0
    only_champion: Images = 0
    neither: Images = 0

    @property
    def images(self) -> int:
        return self.both + self.only_challenger + self.only_champion + self.neither

    @property
    def challenger_accuracy(self) -> float:
        return (self.both + self.only_challenger) / max(1, self.images)

    @property
    def champion_accuracy(self) -> float:
        return (self.both + self.only_champion) / max(1, self.images)

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(
            self.both + other.both,
            self.only_challenger + other.only_challenger,
            self.only_champion + other.only_champion,
            self.neither + other.neither,
        )

    @property
    def gain(self) -> float:
        """The accuracy of the challenger minus that of the champion."""
        return (self.only_challenger - self.only_champion) / max(1, self.images)

    def gain_interval(self) -> ScoreInterval:
        """Interval of the gain: that of McNemar's test, with half an image added to each of the four counts.

        The added images keep its coverage where counts are small (Agresti and Min, 2005).
        """
        better, worse, images = self.only_challenger + 0.5, self.only_champion + 0.5, self.images + 2
        gain = (better - worse) / images
        spread = Z * math.sqrt(better + worse - (better - worse) ** 2 / images) / images
        return ScoreInterval(max(-1.0, gain - spread), min(1.0, gain + spread))

    def challenger_interval(self) -> ScoreInterval:
        """Interval of the challenger's accuracy (Wilson)."""
        images, share = self.images, self.challenger_accuracy
        if not images:
            return ScoreInterval(0.0, 1.0)
        middle = (share + Z**2 / (2 * images)) / (1 + Z**2 / images)
        spread = Z * math.sqrt(share * (1 - share) / images + Z**2 / (4 * images**2)) / (1 + Z**2 / images)
        return ScoreInterval(max(0.0, middle - spread), min(1.0, middle + spread))


def as_metrics(comparison: Comparison, *, with_champion: bool) -> dict[str, float]:
    """Return the metrics of a result that compares two models, or describes the challenger alone."""
    counts = (comparison.both, comparison.only_challenger, comparison.only_champion, comparison.neither)
    paired = dict(zip(_PAIRED, map(float, counts), strict=True))
    return paired if with_champion else {name: paired[name] for name in _ALONE}


def read_metrics(metrics: dict[str, float]) -> tuple[Comparison, bool]:
    """Undo `as_metrics`: the counts, and whether there was a champion. Raises ValueError for anything else."""
    if set(metrics) not in (set(_PAIRED), set(_ALONE)):
        raise ValueError(f"its metrics are {', '.join(sorted(metrics)) or 'none'}, expected are {', '.join(_PAIRED)}")
    if odd := {name: value for name, value in metrics.items() if not (0 <= value < 2**31 and value == int(value))}:
        name, value = next(iter(odd.items()))
        raise ValueError(f"it reports {value} images for {name!r}")
    return Comparison(*(int(metrics.get(name, 0)) for name in _PAIRED)), "champion" in metrics
