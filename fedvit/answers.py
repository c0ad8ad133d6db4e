"""Answers of a model to other tasks than one class for each sample: their numbers, and how right they are."""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedvit.label_forms import LARGEST_OUTPUT, LabelForm

Numbers = npt.NDArray[np.float32]


def scale_labels(form: LabelForm, numbers: npt.NDArray[np.float64]) -> Numbers:
    """Scale a regression's numbers to those that a model learns, (n, 1) float32."""
    scaled: Numbers = ((numbers - form.middle) / form.half).astype(np.float32)
    return scaled


def unscale_outputs(form: LabelForm, outputs: Numbers) -> npt.NDArray[np.float64]:
    """Scale a regression's outputs back, (n, 1) float64; those that are no numbers become the largest."""
    usable = np.nan_to_num(outputs.astype(np.float64), nan=LARGEST_OUTPUT)
    return np.asarray(usable.clip(-LARGEST_OUTPUT, LARGEST_OUTPUT) * form.half + form.middle)


def find_equal(form: LabelForm, left: Numbers, right: Numbers) -> Any:
    """Return which samples have equal answers by two sets of outputs, (n,): numbers within 1 % of the range."""
    if form.task == "segmentation":
        return (left.argmax(axis=-1) == right.argmax(axis=-1)).all(axis=1)
    if form.task == "multi_label":
        return ((left > 0) == (right > 0)).all(axis=1)
    return (np.abs(left - right) <= 0.02).all(axis=1)


def count_right_patches(labels: Any, answers: Any) -> Any:
    """Return the share of right patches of each image, (n,), of (n, patches) classes; 1 where no patch has a class."""
    has_class = labels >= 0
    right = ((answers == labels) & has_class).sum(axis=1)
    return np.where(has_class.any(axis=1), right / np.maximum(has_class.sum(axis=1), 1), 1.0)


def count_right(form: LabelForm, labels: Any, outputs: Numbers) -> Any:
    """Return how right each sample's answer is, (n,) from 0 to 1."""
    if form.task == "segmentation":
        return count_right_patches(labels, outputs.argmax(axis=-1))
    if form.task == "multi_label":
        answered, true = outputs > 0, labels > 0.5
        sizes = answered.sum(axis=1) + true.sum(axis=1)
        shared = 2.0 * (answered & true).sum(axis=1)
        return np.where(sizes == 0, 1.0, shared / np.maximum(sizes, 1))
    errors = np.abs(unscale_outputs(form, outputs) - unscale_outputs(form, labels)).max(axis=1)
    return (1.0 - errors / (form.high - form.low)).clip(0.0, 1.0)


def find_probabilities(logits: Numbers) -> Numbers:
    """Return the probability of each class by itself."""
    return np.asarray(1.0 / (1.0 + np.exp(-logits.clip(-50, 50))), np.float32)
