"""Accuracy by class: a table, and a matrix of the answers."""

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.views.report.document import ClassAccuracy
from profiles.report.tables import Column, Sheet, columns

MOST_CLASSES = 20
"""Most columns of a matrix that are readable; the table of classes names frequent wrong answers in any case."""
MOST_ANSWERS = 3


class AnswerShare(NamedTuple):
    """Test images of one class with one answer."""

    images: int
    share: float  # of the images of its class
    right: bool


class Confusion(NamedTuple):
    """Matrix of answers: rows are classes of images, columns are answers."""

    answers: list[str]
    rows: list[tuple[str, list[AnswerShare]]]


def make_confusion(classes: Sequence[ClassAccuracy]) -> Confusion | None:
    """Make the matrix of an evaluation, in the order of its classes; None if it is empty or too large."""
    if not any(entry.wrong for entry in classes):
        return None
    names = [entry.name for entry in classes] + [name for entry in classes for name in entry.wrong]
    answers = list(dict.fromkeys(names))
    if len(answers) > MOST_CLASSES:
        return None
    return Confusion(answers, [(entry.name, [_count(entry, answer) for answer in answers]) for entry in classes])


def _count(entry: ClassAccuracy, answer: str) -> AnswerShare:
    right = answer == entry.name
    images = entry.correct if right else entry.wrong.get(answer, 0)
    return AnswerShare(images, images / entry.images, right)


def class_sheet(classes: Sequence[ClassAccuracy]) -> Sheet:
    """Make the table of classes, with the most frequent wrong answers."""
    task = classes[0].task if classes else "classification"
    share = "found" if task == "multi_label" else "accuracy"  # of its images; those of other classes do not count
    counted = "test patches" if task == "segmentation" else "test images"
    figures = {"name": "class", "accuracy": share, "images": counted, "devices": "devices"}
    auc = columns({"auc": "AUC"}) if any(entry.auc is not None for entry in classes) else []
    return Sheet(classes, [*columns(figures), *auc, Column("wrong", "taken for", _name_answers)])


def _name_answers(entry: ClassAccuracy) -> str:
    return ", ".join(f"{name} {images}" for name, images in list(entry.wrong.items())[:MOST_ANSWERS])
