"""The tasks of a run beside one class for each sample: what a label is, and what an answer means.

| task | label of a sample, float32 if not said | answer | accuracy |
|---|---|---|---|
| multi_label | (classes,): 1 for each class that it has, else 0 | classes with a logit above 0 | F1 of the sets |
| regression | (1,): a number, scaled to -1 at `low` and 1 at `high` | the output, scaled back | 1 - error / range |
| segmentation | (patches,) int64: a class of each patch, by rows; -1: none | a class of each patch | right patches |

Losses are in `fedvit.methods.losses`, answers in `fedvit.answers`, counts of an evaluation in
`edge_client.work.answer_tally`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

TaskName = Literal["classification", "multi_label", "regression", "segmentation"]
OtherTask = Literal["multi_label", "regression", "segmentation"]
LARGEST_NUMBER = 1e9
"""Largest label of a regression, and the least is its negative."""
Bound = Annotated[float, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
LARGEST_OUTPUT = 1e6
"""Outputs of a regression are cut off here, as a model that diverges gives infinite ones."""

ACCURACY: dict[OtherTask, str] = {
    "multi_label": "F1 of each image's set of classes",
    "regression": "1 - absolute error / range of each image, at least 0",
    "segmentation": "share of each image's patches that are right",
}
"""Accuracy of a task's answers, as reports describe it."""


class LabelForm(Struct, frozen=True, kw_only=True):
    """Labels of another task than one class for each sample."""

    task: OtherTask
    low: Bound = 0.0  # of a regression's numbers: the model sees it as -1
    high: Bound = 1.0  # as 1

    @property
    def half(self) -> float:
        """Half of the range of numbers."""
        return (self.high - self.low) / 2

    @property
    def middle(self) -> float:
        """Middle of the range of numbers."""
        return (self.high + self.low) / 2

    @property
    def labels_patches(self) -> bool:
        """Return whether each patch of an image has a class."""
        return self.task == "segmentation"

    def describe_label(self, classes: int, patches: int) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of one sample's label."""
        return ((patches,), "int64") if self.labels_patches else ((classes,), "float32")
