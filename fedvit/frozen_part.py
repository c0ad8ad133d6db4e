"""The first part of a phase's graph that always computes the same: layers that the phase does not train.

A phase without masks, whose images are not augmented or in a few views each, runs these layers on the same images in
each epoch, and, if they are frozen, in each round. A device may keep their results, the features.
"""

import math
from typing import NamedTuple

from fedvit.errors import BadPayload
from fedvit.onnx_cut import Cut, cut_model
from fedvit.onnx_model import Model
from fedvit.program import Batch, Program, Role, Train

SAMPLES = "batch/patches"
"""The input of a graph that a cut is made behind."""
FEATURE = "batch/feature"
"""Start of the names of inputs that a cut graph reads in place of images."""


class FrozenPart(NamedTuple):
    """A phase's graph in two parts, and how long features of the first one stay the same."""

    cut: Cut
    views: int  # of each image
    tensors: tuple[str, ...]  # that the first part reads
    changing: tuple[str, ...]  # those of them that are others in each round

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """One image's features, by input of the second part."""
        return {name: self.cut.rest.shape(name)[1:] for name in self.cut.inputs}

    @property
    def numbers(self) -> int:
        """Count the numbers of one image's features in one view."""
        return sum(map(math.prod, self.shapes.values()))

    def is_worth_keeping(self, phase: Train) -> bool:
        """Return whether most features are of use more than once."""
        return not self.changing or phase.epochs * phase.repeats >= 2 * self.views


def find_frozen_part(program: Program, phase: Train, model: Model) -> FrozenPart | None:
    """Find the part of a phase's graph whose features can be kept; None if it has none, or does not tell its shapes."""
    views = count_views(program.batch)
    if views is None:
        return None
    trained = {name for group in phase.groups for name in program.names(group)}
    try:
        cut = cut_model(model, SAMPLES, [f"tensor/{name}" for name in program.tensors if name not in trained], FEATURE)
    except BadPayload:
        return None
    if cut is None:
        return None
    tensors = tuple(name.removeprefix("tensor/") for name in cut.features.inputs if name != SAMPLES)
    roles = {name: program.groups[program.tensors[name].group].role for name in tensors}
    return FrozenPart(cut, views, tensors, tuple(name for name in tensors if roles[name] is not Role.FROZEN))


def count_views(batch: Batch) -> int | None:
    """Return in how many forms an image occurs; None: in a new one each time, with other patches, or it is text."""
    if batch.text is not None or batch.kept_patches < batch.patches:
        return None
    return (batch.views or None) if batch.is_augmented else 1
