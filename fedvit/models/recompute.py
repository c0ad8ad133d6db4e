"""A block that stores its input only, and is computed again in the backward pass.

Memory instead of time: of a block's activations (16 units of tokens x width and more) one is kept, and its forward
pass runs twice, a third more FLOPs. Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
arXiv:1604.06174. Written for traced steps, in which torch's own checkpointing does not work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class SampleSeeds:
    """The random number of each sample of the batch that a model computes, for dropout; None: nothing is dropped."""

    now: Tensor | None = None


def recompute_block(block: nn.Module, x_BND: Tensor, seeds: SampleSeeds) -> Tensor:
    """Compute `block(x_BND)`, and again in the backward pass, with the same values dropped."""
    first = seeds.now
    used = _Used(block)
    names, values = zip(*used.named_parameters(), strict=True)

    def run(x_BND: Tensor, *values: Tensor) -> Tensor:
        before, seeds.now = seeds.now, first
        try:
            return cast(Tensor, torch.func.functional_call(used, dict(zip(names, values, strict=True)), (x_BND,)))
        finally:
            seeds.now = before

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Tensor) -> Tensor:
            return run(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            pull = torch.func.vjp(run, *ctx.saved_tensors)[1]
            return pull(*grads)

    return cast(Tensor, Recomputed.apply(x_BND, *values))


class _Used(nn.Module):
    """A block with all modules that it uses: gradients of modules outside of it would be lost."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.others = nn.ModuleList(_from_elsewhere(block))

    def forward(self, x_BND: Tensor) -> Tensor:
        return cast(Tensor, self.block(x_BND))


def _from_elsewhere(block: nn.Module) -> Iterator[nn.Module]:
    """Modules that a hook in the block was given and that are not the block's."""
    own = set(block.modules())
    for module in own:
        for hook in module._forward_hooks.values():
            given = getattr(hook, "args", ())  # of functools.partial
            yield from (other for other in given if isinstance(other, nn.Module) and other not in own)
