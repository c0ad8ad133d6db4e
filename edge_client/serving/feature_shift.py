"""Drift of the mean of features: whether the pictures of a class look, on average, as those of training did.

One picture of a new class often lies no further from training's pictures than they lie from each other. The mean of
some dozens does: chance cancels out, and what they have in common remains. The mean is a moving one (Lowry et al., "A
Multivariate Exponentially Weighted Moving Average Control Chart", Technometrics 1992), of differences from the class
that was answered, so that more pictures of one class are no drift.
"""

import math
from typing import Generic, TypeVar

import numpy as np

from export.bundle.reference import FeatureCentres
from fedvit.data.images import Floats

Value = TypeVar("Value")

WEIGHT = 0.04
"""Weight of a picture in the moving mean; its variance is that of a mean of 49 pictures."""
PICTURES = (2 - WEIGHT) / WEIGHT
LIMIT = 12.0
"""Standard deviations of the mean's squared length, without drift, above which there is an alert."""
MOST_DEVIATIONS = 3.0
"""Largest difference of one feature that counts: a feature that is mostly zero has a small deviation and rare peaks."""
SAME_LOOK = 1.0
"""Mean squared difference of a picture from the last one, in variances, below which it is no news: frames of one thing
have its peculiarities in common. Two pictures of a class have 2."""


MOST_SOURCES = 16
"""Sources whose last picture is kept."""


class LastOfSource(Generic[Value]):
    """The last value of each source, of at most MOST_SOURCES."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def get(self, source: str) -> Value | None:
        return self._values.get(source)

    def put(self, source: str, value: Value) -> None:
        self._values.pop(source, None)
        self._values[source] = value
        if len(self._values) > MOST_SOURCES:
            del self._values[next(iter(self._values))]


class FeatureShift:
    """The moving mean for one model."""

    def __init__(self, centres: FeatureCentres) -> None:
        self._means = np.asarray(centres.means, np.float32)
        self._deviation = np.sqrt(np.asarray(centres.variance, np.float32))
        width = len(self._deviation)
        # means of few images are uncertain themselves
        self._errors = [math.sqrt(width / max(images, 1)) for images in centres.images]
        self._counts = centres.images
        self._chance = (width + LIMIT * math.sqrt(2 * centres.spread)) / PICTURES
        self._last = LastOfSource[Floats]()
        self._begin()

    def _begin(self) -> None:
        self._mean = np.zeros_like(self._deviation)
        self._error = 0.0

    def add(self, features_D: Floats, best: int, source: str = "") -> bool:
        """Add a picture by its features and its answer; return whether there is drift. The mean begins anew then."""
        if not self._counts[best]:  # there is no mean of this class
            return False
        last = self._last.get(source)
        if last is not None and np.square((features_D - last) / self._deviation).mean() < SAME_LOOK:
            return False
        self._last.put(source, features_D)
        scores = (features_D - self._means[best]) / self._deviation
        self._mean += WEIGHT * (np.clip(scores, -MOST_DEVIATIONS, MOST_DEVIATIONS) - self._mean)
        self._error += WEIGHT * (self._errors[best] - self._error)
        if float(self._mean @ self._mean) - self._error**2 <= self._chance:
            return False
        self._begin()
        return True
