"""Drift: whether the pictures that a model answers still look like those that it was made with.

Each value of a picture (brightness, blur, confidence, distance of features) is turned into a normal score by the
quantiles in the bundle's reference, so that no distribution is assumed. A cumulative sum per value and direction
(Page, "Continuous Inspection Schemes", Biometrika 1954) raises the alert, or the mean of features does
(`edge_client.serving.feature_shift`). Sums of each day are kept in one small file.
"""

import logging
import math
import time
from bisect import bisect_left, bisect_right
from datetime import datetime
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_client.serving.feature_shift import FeatureShift, LastOfSource
from edge_client.storage.serving import ServedAnswers
from export.bundle.reference import MEASURES, PictureReference, Quantiles, measure_answers, measure_pixels
from fedvit.data.images import Floats, Pixels
from fedvit.files import atomic_write

log = logging.getLogger(__name__)

DRIFT = "drift.json"
MAX_DRIFT_BYTES = 100_000
MOST_DAYS = 62
MOST_CLASSES = 256
"""Classes of a day's histogram; the last one also counts all further classes."""
LEVEL = 17.0
"""Cumulative sum that raises an alert. With SLACK it comes without drift less than once in a million pictures."""
SLACK = 0.3
SLACK_OF_FEW = 2.4
"""Further slack, divided by the root of the reference's images: quantiles of few images are uncertain. With half of
it, 48 images gave four false alerts in 10,000 pictures."""
SAME_SCENE = 2.0
"""Mean difference of two pictures in a row, of 255, below which the second one is no news: a camera may see one scene
for hours."""
ALERT_LASTS = 1000
"""Pictures after which an alert ends that is not raised again."""
DIRECTIONS = {"brightness": (-1, 1), "blur": (-1, 1), "confidence": (-1,), "distance": (1,)}
FEATURES = "features"
"""Name of the drift of their mean."""
_NORMAL = NormalDist()


class Moments(Struct, frozen=True):
    """Sums over the values of a day."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> "Moments":
        return Moments(self.count + 1, self.total + value, self.squares + value * value)


class Day(Struct, frozen=True, kw_only=True):
    """Statistics of one day."""

    model: str
    answered: ServedAnswers = ServedAnswers()
    classes: tuple[int, ...] = ()
    measures: dict[str, Moments] = {}


class Alert(Struct, frozen=True):
    """An alert that has not ended."""

    at_s: float  # wall clock of its first picture
    pictures: int  # answered since it was raised last


class DriftFile(Struct, frozen=True, kw_only=True):
    """The days, the newest last, and the cumulative sums and alerts."""

    days: dict[str, Day] = {}  # by date
    model: str = ""  # whose sums these are
    sums: dict[str, float] = {}  # by measure and direction
    alerts: dict[str, Alert] = {}  # by measure


class Observation(NamedTuple):
    """One answered picture."""

    pixels: Pixels
    logits: Floats
    features: Floats
    best: int  # class
    confidence: float
    is_unsure: bool
    source: str = ""  # the camera or folder; "": a request


class NormalScores:
    """The normal score of a value within a sample, from its quantiles."""

    def __init__(self, sample: Quantiles) -> None:
        self._quantiles = sample.quantiles
        count = len(self._quantiles)
        places = [min(max(place / 2 / count, 0.5 / count), 1 - 0.5 / count) for place in range(2 * count + 1)]
        self._scores = [_NORMAL.inv_cdf(place) for place in places]
        self.slack = SLACK + SLACK_OF_FEW / math.sqrt(max(sample.images, 1))

    def score(self, value: float) -> float:
        """Return the score; equal quantiles share their middle."""
        return self._scores[bisect_left(self._quantiles, value) + bisect_right(self._quantiles, value)]


class Charts:
    """The cumulative sums of one model."""

    def __init__(self, reference: PictureReference) -> None:
        self._mean = np.asarray(reference.mean, np.float32)
        self._variance = np.asarray(reference.variance, np.float32)
        self._scores = {name: NormalScores(reference.samples[name]) for name in MEASURES if name in reference.samples}
        self.sums = {f"{name}{way:+d}": 0.0 for name in self._scores for way in DIRECTIONS[name]}

    def measure(self, seen: Observation, temperature: float) -> dict[str, float]:
        """Return the values of a picture."""
        pixels = measure_pixels(seen.pixels[None])
        answers = measure_answers(seen.logits[None], seen.features[None], self._mean, self._variance, temperature)
        return {name: float(values[0]) for name, values in {**pixels, **answers}.items()}

    def add(self, values: dict[str, float]) -> list[str]:
        """Add a picture; return the measures that have drifted. Their sums begin anew."""
        drifted = []
        for name, scores in self._scores.items():
            score = scores.score(values[name])
            for way in DIRECTIONS[name]:
                key = f"{name}{way:+d}"
                self.sums[key] = max(0.0, self.sums[key] + way * score - scores.slack)
                if self.sums[key] > LEVEL:
                    self.sums[key] = 0.0
                    drifted.append(name)
        return drifted


def try_reference(reference: PictureReference, seen: Observation) -> None:
    """Measure a picture with throw-away sums. Raises some exception if model and reference do not belong together."""
    charts = Charts(reference)
    charts.add(charts.measure(seen, 1.0))
    if reference.centres:
        FeatureShift(reference.centres).add(seen.features, seen.best)


class DriftWatch:
    """Watches the answered pictures of a device. Call `use` for each model, and write it from time to time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / DRIFT
        self._kept = self._load()
        self._model = ""
        self._temperature = 1.0
        self._charts: Charts | None = None
        self._shift: FeatureShift | None = None
        self._pictures = 0
        self._last = LastOfSource[Pixels]()
        self._raised_at: dict[str, int] = {}  # measure -> number of the picture
        self.alerts: dict[str, float] = {}  # measure -> wall clock

    def use(self, model: str, reference: PictureReference | None, temperature: float) -> None:
        """Measure against another model's reference from now on; None: count only."""
        self._model, self._temperature = model, temperature
        self._charts = Charts(reference) if reference else None
        self._shift = FeatureShift(reference.centres) if reference and reference.centres else None
        self._raised_at, self.alerts = {}, {}
        if self._charts is None:
            log.info("no drift is watched: the bundle was made without enough images", extra={"model": model})
        elif self._kept.model == model:
            known = {key: value for key, value in self._kept.sums.items() if key in self._charts.sums}
            self._charts.sums |= {key: min(max(value, 0.0), LEVEL) for key, value in known.items()}
            raised = {name: alert for name, alert in self._kept.alerts.items() if name in (*MEASURES, FEATURES)}
            self.alerts = {name: alert.at_s for name, alert in raised.items()}
            self._raised_at = {name: self._pictures - alert.pictures for name, alert in raised.items()}

    def add(self, seen: Observation) -> None:
        """Count an answered picture, and raise the alerts that follow from it."""
        values = self._charts.measure(seen, self._temperature) if self._charts else {}
        if not all(map(math.isfinite, values.values())):
            values = {}
        self._pictures += 1
        self._count(seen, values)
        is_news = self._is_news(seen)
        for name in self._find_drift(seen, values) if values and is_news else ():
            if name not in self.alerts:
                log.warning("pictures have drifted", extra={"measure": name, "model": self._model})
                self.alerts[name] = time.time()
            self._raised_at[name] = self._pictures
        for name, at in [*self._raised_at.items()]:
            if self._pictures - at > ALERT_LASTS:
                log.info("pictures look again as those of training", extra={"measure": name})
                del self._raised_at[name], self.alerts[name]

    def _find_drift(self, seen: Observation, values: dict[str, float]) -> list[str]:
        drifted = self._charts.add(values) if self._charts else []
        if self._shift and self._shift.add(seen.features, seen.best, seen.source):
            drifted.append(FEATURES)
        return drifted

    def encode(self) -> bytes:
        """Return the content of the file, of at most MAX_DRIFT_BYTES: the oldest days go first."""
        kept = self._kept
        if self._model:  # else no model could be opened yet, and what is known of the last one stays
            sums = dict(self._charts.sums) if self._charts else {}
            alerts = {name: Alert(self.alerts[name], self._pictures - at) for name, at in self._raised_at.items()}
            kept = replace(kept, model=self._model, sums=sums, alerts=alerts)
        while len(content := msgspec.json.encode(kept)) > MAX_DRIFT_BYTES and kept.days:
            kept = replace(kept, days=dict([*kept.days.items()][1:]))
        self._kept = kept
        return content

    def write(self, content: bytes) -> None:
        """Replace the file. Raises StorageFailed."""
        atomic_write(self._file, content, private=True, durable=False)

    @property
    def days(self) -> dict[str, Day]:
        """The statistics by date."""
        return self._kept.days

    def _is_news(self, seen: Observation) -> bool:
        """Return whether a picture differs from the last one of its source that did."""
        last, pixels = self._last.get(seen.source), seen.pixels
        is_same_size = last is not None and last.shape == pixels.shape
        if last is not None and is_same_size and np.abs(last.astype(np.int16) - pixels).mean() < SAME_SCENE:
            return False
        self._last.put(seen.source, pixels)
        return True

    def _count(self, seen: Observation, values: dict[str, float]) -> None:
        date = datetime.now().date().isoformat()
        days = dict(self._kept.days)
        day = days.get(date) or Day(model=self._model)
        classes = [*day.classes, *[0] * (min(len(seen.logits), MOST_CLASSES) - len(day.classes))]
        classes[min(seen.best, MOST_CLASSES - 1)] += 1
        days[date] = replace(
            day,
            model=self._model,
            answered=day.answered.add(seen.confidence, is_unsure=seen.is_unsure),
            classes=tuple(classes),
            measures={name: day.measures.get(name, Moments()).add(value) for name, value in values.items()},
        )
        self._kept = replace(self._kept, days=dict([*days.items()][-MOST_DAYS:]))

    def _load(self) -> DriftFile:
        try:
            with self._file.open("rb") as file:
                return msgspec.json.decode(file.read(2 * MAX_DRIFT_BYTES), type=DriftFile)
        except (OSError, ValueError):  # statistics only: they begin anew
            return DriftFile()
