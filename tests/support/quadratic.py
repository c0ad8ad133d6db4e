"""What tests of methods with two models on a device share: a model of one block in float64, its twin, a parabola."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedvit.methods.apfl import ALPHA
from fedvit.methods.base import StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.twins import TWIN
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Train

HALF = (0.5, 0.5, 0.5)
BATCH = Batch(image_size=16, patch_size=8, batch_size=8, mean=HALF, std=HALF)

Inputs = dict[str, Tensor]


def small(classes: int = 3) -> PatchViT:
    """One block of width 8; four patches."""
    options = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2}
    return build_vit(SMALL, classes, seed=0, options=options)


class Quadratic:
    """f(x) = x^2 / 2 in every number x of the model, so that the gradient is x itself."""

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        squares = [tensors[name].square().sum() for name, _ in vit.vit.named_parameters()]
        return Objective(0.5 * torch.stack(squares).sum(), {})


def in_double(inputs: Mapping[str, Tensor]) -> Inputs:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def own(inputs: Named, prefix: str = "") -> dict[str, Tensor]:
    """Values of the shared model, or with the twin's prefix of the personal one, by the model's names."""
    names = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
    if prefix:
        return {name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)}
    return {name: value for name, value in names.items() if not name.startswith(TWIN) and name != ALPHA}


def after(inputs: Named, outputs: Named) -> Inputs:
    """The inputs of a next step: what the step gave is put back."""
    new = {name.removeprefix("new/"): value for name, value in outputs.items() if name.startswith("new/")}
    return {**inputs, **new}


def assert_close(got: Named, want: Named, rtol: float = 1e-10, atol: float = 1e-14) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol)
