"""Prototypes: the mean features of each class over all devices, toward which devices pull the features of theirs."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import (
    Images,
    Method,
    RoundContext,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
    cross_entropy,
    run_model,
)
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.rules.weighted_mean import WeightedMean, move_tensors
from fedvit.models.vit import PatchViT
from fedvit.program import Train

PROTOTYPES, KNOWN, SUMS = "prototypes", "known_prototypes", "class_sums"
SUM_UP = "sum_up"
"""The graph that sums features up by class."""
TOTAL, IMAGES = "total", "images"


@dataclass(frozen=True, kw_only=True)
class WithPrototypes(Method, ABC):
    """A device minimises its loss + lam |f(x) - C_y|^2 / D: f are the D numbers that the head reads, C_y the prototype
    of the image's class, if there is one.

    After the training it sends, for each class, the sum of f and the number of images, in units of its number of
    images: the weighted mean of devices has the prototypes then.
    """

    one_gradient: ClassVar[bool] = False
    why_one_class = "it averages features by class"

    lam: Annotated[float, Meta(ge=0)] = 1.0  # strength of the pull to the prototypes (paper: lambda)

    @property
    def reads_text(self) -> bool:
        return False

    def describe(self, features: Tensor) -> Tensor:
        """(B, n) the numbers whose sums are sent; features come first."""
        return features

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        # sums are of a shared group that stays zero on the server, so that a device's change is its own sum
        classes, width = vit.tensors()["head.weight"].shape
        columns = self.describe(torch.zeros(1, width)).shape[1] + 1
        return {
            PROTOTYPES: torch.zeros(classes, width),
            KNOWN: torch.zeros(classes),
            SUMS: torch.zeros(classes, columns),
        }

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        features, logits = read_features(vit, tensors, inputs.images)
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        is_class = one_hot(inputs.labels, logits)
        apart = (features - is_class @ tensors[PROTOTYPES]).square().mean(dim=1)
        return Objective(loss + self.lam * inputs.mean(is_class @ tensors[KNOWN] * apart), {}, shown=loss)

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != SUM_UP:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        features, logits = read_features(vit, fixed, inputs.images)
        weight = inputs.weight.unsqueeze(1)
        batch = one_hot(inputs.labels, logits).T @ torch.cat([self.describe(features) * weight, weight], dim=1)
        total, images = (calculus.inputs[f"slot/{slot}/{SUMS}"] for slot in (TOTAL, IMAGES))
        total, images = total + batch, images + inputs.weight.sum()
        calculus.slots |= {f"{TOTAL}/{SUMS}": total, f"{IMAGES}/{SUMS}": images}
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        return StepResult(loss, {SUMS: total / (images.clamp(min=1) * find_unit(features.shape[1]))}, {})

    def sum_phase(self) -> Train:
        return self.phase(("sums",), graph=SUM_UP, epochs=1, slots=(TOTAL, IMAGES))


def find_unit(width: int) -> float:
    """Return the unit of sums: no number behind a LayerNorm is larger, so that they fit the range of a secure sum."""
    return float(width**0.5)


def read_features(vit: PatchViT, tensors: Named, images: Images) -> tuple[Tensor, Tensor]:
    """Return (B, D) what the head reads, and its (B, C) logits."""

    def body(vit: PatchViT) -> tuple[Tensor, Tensor]:
        features = vit.features(vit.run_to_class(vit.embed(*images), 0))
        return features, vit.head(features)

    read: tuple[Tensor, Tensor] = run_model(vit, tensors, body)
    return read


def find_features(vit: PatchViT, tensors: Named, images: Images) -> Tensor:
    """(B, D) what the head reads."""
    features: Tensor = run_model(vit, tensors, lambda vit: vit.features(vit.run_to_class(vit.embed(*images), 0)))
    return features


def one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """(B, C) 1 for the class of a sample."""
    return (labels.unsqueeze(1) == torch.arange(logits.shape[1], device=labels.device)).to(logits.dtype)


@dataclass(frozen=True, kw_only=True)
class MeansOfClasses(WeightedMean):
    """Averages the shared tensors, and divides the cohort's sum of each class by its number of images."""

    why_never_late = "its server needs the features of its newest prototypes"
    averages = False

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """A class that no device of the cohort has keeps its prototype. Raises EmptyCohort as the mean does."""
        steps = self.average(state, uploads, context)
        sums, before = steps.pop(SUMS), state.tensors[PROTOTYPES]
        updated, figures = move_tensors(state, steps) if steps else (state, {})
        count = sums[:, -1:]
        prototypes = np.where(count > 0, sums[:, : before.shape[1]] / np.where(count > 0, count, 1), before)
        known = np.maximum(state.tensors[KNOWN], (count[:, 0] > 0).astype(np.float32))
        tensors = {**updated.tensors, PROTOTYPES: prototypes.astype(np.float32), KNOWN: known}
        return replace(updated, tensors=tensors), {**figures, "known_prototypes": float(known.sum())}
