"""What was answered for the images of each class, as a matrix."""

from collections.abc import Sequence
from typing import NamedTuple

from profiles.report.document import ClassAccuracy

MOST_CLASSES = 20
"""Of a matrix: more columns are not readable. Tables of classes name the most frequent wrong answers in any case."""


class Cell(NamedTuple):
    images: int
    share: float  # of the images of its class
    right: bool


class Confusion(NamedTuple):
    """Rows are classes of images, columns are answers."""

    answers: list[str]
    rows: list[tuple[str, list[Cell]]]


def confusion(classes: Sequence[ClassAccuracy]) -> Confusion | None:
    """The matrix of an evaluation, in the order of its classes; None where there is none, or it is too large."""
    if not any(entry.wrong for entry in classes):
        return None
    named = [entry.name for entry in classes] + [name for entry in classes for name in entry.wrong]
    answers = list(dict.fromkeys(named))
    if len(answers) > MOST_CLASSES:
        return None
    return Confusion(answers, [(entry.name, [_cell(entry, answer) for answer in answers]) for entry in classes])


def _cell(entry: ClassAccuracy, answer: str) -> Cell:
    right = answer == entry.name
    images = entry.correct if right else entry.wrong.get(answer, 0)
    return Cell(images, images / entry.images, right)


def taken_for(entry: ClassAccuracy, most: int = 3) -> str:
    """The most frequent wrong answers in words.

    >>> taken_for(ClassAccuracy(name="ant", devices=1, images=9, correct=2, wrong={"bee": 5, "fly": 2}))
    'bee 5, fly 2'
    """
    return ", ".join(f"{name} {images}" for name, images in list(entry.wrong.items())[:most])
