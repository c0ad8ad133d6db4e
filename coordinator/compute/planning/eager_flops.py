"""The FLOPs of a method's graphs, counted while torch runs their functions."""

from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fedvit.methods.base import Method
from fedvit.methods.calculus import TorchCalculus, TracedCalculus
from fedvit.methods.failures import name_errors
from fedvit.methods.step import (
    Serves,
    Step,
    Update,
    example_inputs,
    gather_step,
    predict_step,
    steps_of,
    train_step,
)
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Gather, Train


def count_flops(method: Method, vit: PatchViT, batch: Batch) -> dict[str, int]:
    """Return the FLOPs of one run of each graph of a method, 2 per multiply-add, as `profiles.cost` counts them."""
    return {name: _count(method, vit, batch, serves) for name, serves in steps_of(method, vit).items()}


def _count(method: Method, vit: PatchViT, batch: Batch, serves: Serves) -> int:
    if isinstance(serves, Update):  # elementwise
        return 0
    inputs = example_inputs(method, vit, batch, serves)
    step = name_errors(_find_step(method, vit, serves), method, serves)
    # what the forward pass computes beside gathered values is not in the graph; and torch's counter cannot look into a
    # backward pass that computes blocks again
    if isinstance(serves, Gather) or method.recompute:
        traced = make_fx(step)(inputs)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        step = traced
    with FlopCounterMode(display=False) as counter:
        step(inputs)
    return int(counter.get_total_flops())


def _find_step(method: Method, vit: PatchViT, serves: Train | Gather | None) -> Step:
    if isinstance(serves, Train):
        return train_step(method, vit, serves, TracedCalculus if method.recompute else TorchCalculus)
    return gather_step(method, vit, serves) if isinstance(serves, Gather) else predict_step(method, vit)
