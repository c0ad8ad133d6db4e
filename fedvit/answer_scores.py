"""Scores of an evaluation that weigh classes equally, from counts that add up over devices.

Scores of answers are counted in bins; images in one bin count as equal, so that an AUC is right to half of the pairs
within bins.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from fedvit.wire.messages import SCORE_BINS, ClassCount

Histogram = list[list[int]]
"""Images of a class, and other images, by bin."""

SCORE_NAMES = {"auc": "AUC", "mean_ap": "mean AP", "macro_f1": "macro F1", "mae": "MAE", "r2": "R2", "miou": "mean IoU"}
"""Names of scores in tables."""


class EvaluationCounts(NamedTuple):
    """The counts of one device's evaluation."""

    images: int
    metrics: Mapping[str, float]
    by_class: Sequence[ClassCount]

    @property
    def has_one_class(self) -> bool:
        """Return whether the right answers are those of single classes, not of sets."""
        counts = self.by_class
        return (sum(count.images for count in counts), sum(count.correct for count in counts)) == (
            self.images, self.metrics.get("correct"),
        )  # fmt: skip


def score_answers(devices: Sequence[EvaluationCounts]) -> dict[str, float]:
    """Return the scores of an evaluation of all devices together, by the names of SCORE_NAMES; those that are known."""
    images = sum(device.images for device in devices)
    if not images:
        return {}
    if "absolute_error" in devices[0].metrics:
        return _score_numbers([device.metrics for device in devices], images)
    if any("patches" in device.metrics for device in devices):
        mean = _find_mean_iou([count for device in devices for count in device.by_class])
        return {} if mean is None else {"miou": mean}
    histograms = add_histograms(count for device in devices for count in device.by_class)
    scores = {"auc": find_mean_auc(histograms)}
    if not all(device.has_one_class for device in devices if device.by_class):
        scores |= {"mean_ap": _find_mean_ap(histograms), "macro_f1": _find_macro_f1(histograms)}
    return {name: value for name, value in scores.items() if value is not None}


def add_histograms(counts: Iterable[ClassCount]) -> dict[int, Histogram]:
    """Add the scores of each class over devices."""
    added: dict[int, Histogram] = {}
    for count in counts:
        for place, *both in count.scores:
            histogram = added.setdefault(count.label, [[0] * SCORE_BINS, [0] * SCORE_BINS])
            for side, images in enumerate(both):
                histogram[side][place] += images
    return added


def find_mean_auc(histograms: Mapping[int, Histogram]) -> float | None:
    """Return the mean over classes of the area under the ROC curve of one class against all others; None: unknown."""
    areas = [area for histogram in histograms.values() if (area := find_auc(*histogram)) is not None]
    return fmean(areas) if areas else None


def find_auc(of_class: Sequence[int], others: Sequence[int]) -> float | None:
    """Return the share of pairs of an image of a class and another one in which the first has the higher score.

    None if there is no such pair.

    >>> find_auc([0, 1, 1], [2, 1, 0]), find_auc([1], [0])
    (0.9166666666666666, None)
    """
    pairs = sum(of_class) * sum(others)
    below, above = 0, 0.0
    for mine, theirs in zip(of_class, others, strict=True):
        above += mine * (below + theirs / 2)
        below += theirs
    return above / pairs if pairs else None


def find_average_precision(of_class: Sequence[int], others: Sequence[int]) -> float | None:
    """Return the mean precision over recalls, where the images of a bin are answered together; None without images.

    >>> find_average_precision([0, 1, 1], [2, 1, 0])
    0.8333333333333333
    """
    total, answered, right, area = sum(of_class), 0, 0, 0.0
    for mine, theirs in zip(reversed(of_class), reversed(others), strict=True):
        answered, right = answered + mine + theirs, right + mine
        area += mine * right / answered if answered else 0.0
    return area / total if total else None


def _find_mean_ap(histograms: Mapping[int, Histogram]) -> float | None:
    known = [found for histogram in histograms.values() if (found := find_average_precision(*histogram)) is not None]
    return fmean(known) if known else None


def _find_macro_f1(histograms: Mapping[int, Histogram]) -> float | None:
    """Return the mean F1 over the classes that occur or were answered: those with log-odds of at least 0."""
    scores = []
    for of_class, others in histograms.values():
        right, wrong = sum(of_class[SCORE_BINS // 2 :]), sum(others[SCORE_BINS // 2 :])
        if sizes := sum(of_class) + right + wrong:
            scores.append(2 * right / sizes)
    return fmean(scores) if scores else None


def _find_mean_iou(counts: Sequence[ClassCount]) -> float | None:
    """Return the mean over classes of the intersection over the union of their patches; None: answers are not known."""
    right, of_class, answered = (Counter[int]() for _ in range(3))
    for count in counts:
        if sum(patches for _, patches in count.wrong) != count.images - count.correct:
            return None
        right[count.label] += count.correct
        of_class[count.label] += count.images
        answered.update({count.label: count.correct} | dict(count.wrong))
    labels = of_class.keys() | {label for label, patches in answered.items() if patches}
    return (
        None
        if not labels
        else fmean(right[label] / (of_class[label] + answered[label] - right[label]) for label in labels)
    )


def _score_numbers(metrics: Sequence[Mapping[str, float]], images: int) -> dict[str, float]:
    """Return the mean absolute error, and R2 where devices told the sums of their numbers."""
    if not all(of.keys() >= {"absolute_error", "squared_error"} for of in metrics):
        return {}
    sums = {name: sum(of.get(name, 0.0) for of in metrics) for of in metrics for name in of}
    scores = {"mae": sums["absolute_error"] / images}
    if all("number" in of and "squared_number" in of for of in metrics):
        spread = sums["squared_number"] - sums["number"] ** 2 / images
        if spread > 0:
            scores["r2"] = 1 - sums["squared_error"] / spread
    return scores
