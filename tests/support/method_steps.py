"""Steps of a method's phases in float64, and the inputs of server rules, for tests beside a paper's equations."""

import torch
from torch import Tensor

from fedvit.methods.base import Images, Method, RoundContext
from fedvit.methods.calculus import Named
from fedvit.methods.class_sums import read_features
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models.vit import PatchViT
from fedvit.program import Train
from tests.support.quadratic import BATCH, Inputs, in_double
from tests.support.steps import whole


def find_phase(method: Method, vit: PatchViT, graph: str) -> Train:
    [phase] = [phase for phase in method.phases(vit) if phase.graph == graph]
    return phase


def make_inputs(method: Method, vit: PatchViT, lr: float, graph: str = "train", seed: int = 0) -> Inputs:
    inputs = in_double(example_inputs(method, vit, BATCH, whole(find_phase(method, vit, graph)), seed=seed))
    return inputs | {"hyper/lr": torch.tensor(lr, dtype=torch.float64)}


def run_step(method: Method, vit: PatchViT, inputs: Inputs, graph: str = "train") -> Inputs:
    return whole_step(method, vit, whole(find_phase(method, vit, graph)))(inputs)


def make_leaves(inputs: Named, names: list[str]) -> Inputs:
    """Copies of tensors that collect gradients."""
    return {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in names}


def read(vit: PatchViT, tensors: Named, inputs: Named) -> tuple[Tensor, Tensor]:
    """Features and logits of the batch, padding included."""
    return read_features(vit, tensors, Images(inputs["batch/patches"], None))


def make_context(vit: PatchViT, number: int = 1) -> RoundContext:
    return RoundContext(
        round=number, seed=0, lr_scale=1.0, vit=vit, accelerator="cpu",
        load=lambda digest: {}, progress=lambda line: None,
    )  # fmt: skip


def assert_descent(after: Named, inputs: Named, leaves: Named, lr: float) -> None:
    """Every leaf has made a step of plain SGD by its gradient."""
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        want = inputs[f"tensor/{name}"] - lr * leaf.grad
        torch.testing.assert_close(after[f"new/tensor/{name}"], want, rtol=1e-8, atol=1e-11, msg=name)
