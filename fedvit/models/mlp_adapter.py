"""Pfeiffer's adapter: a bottleneck behind the MLP of every block."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedvit.model_options import check_switch, check_whole
from fedvit.models.model_patch import ModelPatch, plain_blocks, seed_random
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class MlpAdapter(ModelPatch):
    """In every block: y = mlp(norm2(x)), x <- x + y + up(tanh(down(y))); `up` begins at zero, so the model as its base.

    Source: FedPerfix, arXiv:2308.09160, Table 6. Its released code has one adapter for all blocks and begins with
    zeros everywhere, so only the bias of `up` ever learns; `shared_dead` is that one, to reproduce the table.
    Tensors: `blocks.i.mlp.adapter.{down,up}.{weight,bias}`, or `mlp_adapter.{down,up}.{weight,bias}`.
    """

    bottleneck: int = 64  # the paper does not say
    shared_dead: bool = False

    def __post_init__(self) -> None:
        check_whole("MlpAdapter", "bottleneck", self.bottleneck)
        check_switch("MlpAdapter", "shared_dead", self.shared_dead)

    def apply(self, vit: PatchViT, seed: int) -> None:
        blocks = plain_blocks(vit)
        with seed_random(seed, "mlp_adapter"):
            adapters = [_Adapter(vit.width, self.bottleneck) for _ in blocks]
        if self.shared_dead:
            adapters = adapters[:1] * len(blocks)
            for value in adapters[0].parameters():
                nn.init.zeros_(value)
            vit.add("mlp_adapter", adapters[0])
        else:
            for index, adapter in enumerate(adapters):
                vit.add(f"blocks.{index}.mlp.adapter", adapter)
        for block, adapter in zip(blocks, adapters, strict=True):
            block.mlp.register_forward_hook(partial(_add, adapter))


class _Adapter(nn.Module):
    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, y_BND: Tensor) -> Tensor:
        added: Tensor = self.up(torch.tanh(self.down(y_BND)))
        return added


def _add(adapter: nn.Module, mlp: nn.Module, args: tuple[Tensor, ...], y_BND: Tensor) -> Tensor:
    """A forward hook: its result replaces the MLP's output."""
    added: Tensor = y_BND + adapter(y_BND)
    return added
