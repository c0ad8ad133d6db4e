"""Counts of an evaluation's answers, by the run's task: sums that add up over devices."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fedvit.answers import count_right, count_right_patches, unscale_outputs
from fedvit.label_forms import LabelForm
from fedvit.program import Program
from fedvit.wire.messages import MAX_CONFUSED_CLASSES, MAX_SCORED_CLASSES, SCORE_BINS, ClassCount

BINS_PER_UNIT = 2
"""Bins of scores by unit of log-odds; the middle of all bins is 0, a probability of one half."""


ErrorSum = Literal["absolute_error", "squared_error"]
LabelSum = Literal["number", "squared_number", "patches"]


class AnswerTally:
    """Counts answers by class, and wrong ones by what was answered where there are few classes."""

    reads_scores = False
    """True if `add` reads the model's outputs; else their largest are enough."""

    def __init__(self, classes: int) -> None:
        self.correct = 0.0
        self.errors: dict[ErrorSum, float] = {}
        self.labels: dict[LabelSum, float] = {}
        self._right, self._seen = (np.zeros(classes, np.int64) for _ in range(2))
        self._answered = np.zeros((classes, classes), np.int64) if classes <= MAX_CONFUSED_CLASSES else None

    def add(self, labels: Any, outputs: Any) -> None:
        """Add readable samples, with the outputs of the predict graph."""
        self.add_answers(labels, outputs.argmax(axis=-1))

    def add_answers(self, labels: Any, answers: Any) -> None:
        """Add readable samples with the classes that were answered."""
        self.correct += float((answers == labels).reshape(len(labels), -1).mean(axis=1).sum()) if len(labels) else 0.0
        if labels.ndim == 1:  # a sample of text has characters of many classes
            self.add_pairs(labels, answers)

    def add_pairs(self, labels: Any, answers: Any) -> None:
        """Count by class, (n,) and (n,)."""
        classes = len(self._seen)
        self._right += np.bincount(labels[answers == labels], minlength=classes)
        self._seen += np.bincount(labels, minlength=classes)
        if self._answered is not None:
            pairs = np.ravel_multi_index((labels.astype(np.int64), answers.astype(np.int64)), (classes, classes))
            self._answered += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    def by_class(self) -> tuple[ClassCount, ...]:
        """Return the counts of the classes with test images."""
        return tuple(
            ClassCount(label, int(self._right[label]), int(self._seen[label]), self._wrong(label))
            for label in np.flatnonzero(self._seen).tolist()
        )

    def _wrong(self, label: int) -> tuple[tuple[int, int], ...]:
        if self._answered is None:
            return ()
        row = self._answered[label]
        return tuple((other, int(row[other])) for other in np.flatnonzero(row).tolist() if other != label)


class ScoreTally(AnswerTally):
    """Counts the log-odds of every class, too, apart for its images and for those of other classes."""

    reads_scores = True

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self._scores = np.zeros((classes, SCORE_BINS, 2), np.int64)

    def add(self, labels: Any, outputs: Any) -> None:
        super().add(labels, outputs)
        self.add_scores(labels[:, None] == np.arange(outputs.shape[1]), find_log_odds(outputs))

    def add_scores(self, is_class: Any, scores: Any) -> None:
        """Add (n, classes) scores; `is_class`: which images are of which class."""
        bins = np.nan_to_num(scores.astype(np.float64)) * BINS_PER_UNIT + SCORE_BINS // 2
        places = np.floor(bins).clip(0, SCORE_BINS - 1).astype(np.int64)
        for label in range(scores.shape[1]):
            for side, chosen in ((0, is_class[:, label]), (1, ~is_class[:, label])):
                self._scores[label, :, side] += np.bincount(places[chosen, label], minlength=SCORE_BINS)

    def by_class(self) -> tuple[ClassCount, ...]:
        """Return the counts of all classes, as images of other classes have scores, too."""
        return tuple(
            ClassCount(
                label, int(self._right[label]), int(self._seen[label]), self._wrong(label), self._list_scores(label)
            )
            for label in range(len(self._seen))
        )

    def _list_scores(self, label: int) -> tuple[tuple[int, int, int], ...]:
        counts = self._scores[label]
        places = np.flatnonzero(counts.any(axis=1)).tolist()
        return tuple((place, int(counts[place, 0]), int(counts[place, 1])) for place in places)


class SetTally(ScoreTally):
    """Counts a multi-label task: right answers are images of a class for which it was answered."""

    def __init__(self, classes: int, form: LabelForm) -> None:
        super().__init__(classes)
        self._form = form
        self._answered = None

    def add(self, labels: Any, outputs: Any) -> None:
        is_class = labels > 0.5
        self.correct += float(count_right(self._form, labels, outputs).sum())
        self._right += (is_class & (outputs > 0)).sum(axis=0)
        self._seen += is_class.sum(axis=0)
        if len(self._seen) <= MAX_SCORED_CLASSES:
            self.add_scores(is_class, outputs)


class PatchTally(AnswerTally):
    """Counts the patches of a segmentation; those without a class count nowhere."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.labels = {"patches": 0.0}

    def add_answers(self, labels: Any, answers: Any) -> None:
        self.correct += float(count_right_patches(labels, answers).sum())
        has_class = labels >= 0
        self.labels["patches"] += float(has_class.sum())
        self.add_pairs(labels[has_class], answers[has_class])


class NumberTally(AnswerTally):
    """Sums the errors of a regression, in the unit of its numbers.

    From `labels`, sums of distances from the middle of the range, the variance follows: also of numbers like 1e9 + 0.1.
    """

    reads_scores = True

    def __init__(self, form: LabelForm) -> None:
        super().__init__(1)
        self._form = form
        self.errors = {"absolute_error": 0.0, "squared_error": 0.0}
        self.labels = {"number": 0.0, "squared_number": 0.0}

    def add(self, labels: Any, outputs: Any) -> None:
        numbers, answers = (unscale_outputs(self._form, values) - self._form.middle for values in (labels, outputs))
        self.correct += float(count_right(self._form, labels, outputs).sum())
        self.errors["absolute_error"] += float(np.abs(answers - numbers).sum())
        self.errors["squared_error"] += float(np.square(answers - numbers).sum())
        self.labels["number"] += float(numbers.sum())
        self.labels["squared_number"] += float(np.square(numbers).sum())

    def by_class(self) -> tuple[ClassCount, ...]:
        return ()


def list_metrics(
    correct: float, errors: Mapping[ErrorSum, float], labels: Mapping[LabelSum, float], *, counts_classes: bool
) -> dict[str, float]:
    """Return the metrics of an evaluation's result; sums of labels alone are sent where answers by class are."""
    sums: dict[str, float] = {"correct": correct} | dict(errors.items())
    return sums | (dict(labels.items()) if counts_classes else {})


def make_tally(program: Program) -> AnswerTally:
    """Make the counts of one evaluation."""
    form, classes = program.batch.labels, len(program.classes)
    if form and form.task == "regression":
        return NumberTally(form)
    if form and form.task == "segmentation":
        return PatchTally(classes)
    if form:
        return SetTally(classes, form)
    scores = program.evaluate.counts_classes and program.evaluate.counts_scores and not program.batch.text
    return ScoreTally(classes) if scores and classes <= MAX_SCORED_CLASSES else AnswerTally(classes)


def find_log_odds(logits: Any) -> Any:
    """Return the log-odds of each class against all others, (n, classes)."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    others = np.maximum(powers.sum(axis=1, keepdims=True) - powers, np.finfo(np.float64).tiny)
    return shifted - np.log(others)
