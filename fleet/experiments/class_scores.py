"""Scores of devices that weigh all classes equally, from the answers of an evaluation by class."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fedvit.answer_scores import add_histograms, find_mean_auc
from fedvit.wire.messages import ClassCount


class ClassScores(NamedTuple):
    """Scores of one device on its own test images."""

    balanced: float  # mean over the classes with test images of the share of right answers
    macro_f1: float | None  # mean over the classes that occur or were answered; None: wrong answers were not counted
    auc: float | None = None  # mean over the classes that some images have and others have not; None: not counted


def score_classes(counts: Sequence[ClassCount]) -> ClassScores | None:
    """Score the answers of one device; None without counts.

    >>> score_classes([ClassCount(0, 3, 4, ((1, 1),)), ClassCount(1, 1, 2, ((2, 1),))])
    ClassScores(balanced=0.625, macro_f1=0.4523809523809524, auc=None)
    """
    tested = [count for count in counts if count.images]
    if not tested:
        return None
    balanced = fmean(count.correct / count.images for count in tested)
    auc = find_mean_auc(add_histograms(counts))
    if any(sum(images for _, images in count.wrong) != count.images - count.correct for count in tested):
        return ClassScores(balanced, None, auc)
    right = {count.label: count.correct for count in tested}
    missed = {count.label: count.images - count.correct for count in tested}
    answered_wrongly: Counter[int] = Counter()
    for count in tested:
        answered_wrongly.update(dict(count.wrong))
    f1 = [
        2 * right.get(label, 0) / (2 * right.get(label, 0) + missed.get(label, 0) + answered_wrongly[label])
        for label in right.keys() | answered_wrongly.keys()
    ]
    return ClassScores(balanced, fmean(f1), auc)
