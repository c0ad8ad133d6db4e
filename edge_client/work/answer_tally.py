"""Counts of an evaluation's answers by class."""

import numpy as np

from fedvit.tensors import Array
from fedvit.wire.messages import MAX_CONFUSED_CLASSES, ClassCount


class AnswerTally:
    """Counts answers by class, and wrong ones by what was answered where there are few classes."""

    def __init__(self, classes: int) -> None:
        self._right, self._seen = (np.zeros(classes, np.int64) for _ in range(2))
        self._answered = np.zeros((classes, classes), np.int64) if classes <= MAX_CONFUSED_CLASSES else None

    def add(self, labels: Array, answers: Array) -> None:
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
