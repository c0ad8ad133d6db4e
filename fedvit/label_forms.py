"""The tasks of a run beside one class for each sample: what a label is, and what an answer means.

| task | label of a sample, float32 | answer | accuracy |
|---|---|---|---|
| multi_label | (classes,): 1 for each class that it has, else 0 | classes with a logit above 0 | F1 of the sets |
| regression | (1,): a number, scaled to -1 at `low` and 1 at `high` | the output, scaled back | 1 - error / range |

Losses are in `fedvit.methods.losses`, counts of an evaluation in `edge_client.work.answer_tally`.
"""

from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

Numbers = npt.NDArray[np.float32]

TaskName = Literal["classification", "multi_label", "regression"]
OtherTask = Literal["multi_label", "regression"]
Bound = Annotated[float, Meta(ge=-1e9, le=1e9)]
LARGEST_OUTPUT = 1e6
"""Outputs of a regression are cut off here, as a model that diverges gives infinite ones."""

ACCURACY: dict[OtherTask, str] = {
    "multi_label": "of each image the F1 of its set of classes",
    "regression": "of each image 1 - absolute error / range, at least 0",
}
"""What stands for a right answer, for reports."""


class LabelForm(Struct, frozen=True, kw_only=True):
    """Labels of another task than one class for each sample."""

    task: OtherTask
    low: Bound = 0.0  # of a regression's numbers: the model sees it as -1
    high: Bound = 1.0  # as 1

    @property
    def half(self) -> float:
        """Half of the range of numbers."""
        return (self.high - self.low) / 2

    def scale(self, numbers: Numbers) -> Numbers:
        """Scale a regression's numbers to those that a model learns."""
        scaled: Numbers = ((numbers - (self.low + self.high) / 2) / self.half).astype(np.float32)
        return scaled

    def unscale(self, outputs: Numbers) -> npt.NDArray[np.float64]:
        """Scale a model's outputs back; those that are no numbers become the largest."""
        usable = np.nan_to_num(outputs.astype(np.float64), nan=LARGEST_OUTPUT)
        return np.asarray(usable.clip(-LARGEST_OUTPUT, LARGEST_OUTPUT) * self.half + (self.low + self.high) / 2)

    def describe_label(self, classes: int) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of one sample's label."""
        return (classes,), "float32"

    def find_equal(self, left: Numbers, right: Numbers) -> Any:
        """Return which samples have equal answers by two sets of outputs, (n,): numbers within 1 % of the range."""
        if self.task == "multi_label":
            return ((left > 0) == (right > 0)).all(axis=1)
        return (np.abs(left - right) <= 0.02).all(axis=1)


def count_right(form: LabelForm, labels: Numbers, outputs: Numbers) -> Any:
    """Return how right each sample's answer is, (n,) from 0 to 1."""
    if form.task == "multi_label":
        answered, true = outputs > 0, labels > 0.5
        sizes = answered.sum(axis=1) + true.sum(axis=1)
        shared = 2.0 * (answered & true).sum(axis=1)
        return np.where(sizes == 0, 1.0, shared / np.maximum(sizes, 1))
    errors = np.abs(form.unscale(outputs) - form.unscale(labels)).max(axis=1)
    return (1.0 - errors / (form.high - form.low)).clip(0.0, 1.0)


def find_probabilities(logits: Numbers) -> Numbers:
    """Return the probability of each class by itself."""
    return np.asarray(1.0 / (1.0 + np.exp(-logits.clip(-50, 50))), np.float32)
