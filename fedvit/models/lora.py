"""LoRA: low-rank additions to the query and value projections."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedvit.model_options import LORA_ALPHA, check_number, check_whole
from fedvit.models.attention import attentions
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class Lora(ModelPatch):
    """In every block: W_q x becomes W_q x + (alpha / rank) B A x, and W_v x the same way; keys stay.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685. B (D, rank) begins at
    zero, so the model as its base; A (rank, D) as the released code does (kaiming uniform).
    Tensors: `blocks.i.attn.qkv.{lora_q,lora_v}.{a,b}`.
    """

    rank: int = 16
    alpha: float = LORA_ALPHA

    def __post_init__(self) -> None:
        check_whole("Lora", "rank", self.rank)
        check_number("Lora", "alpha", self.alpha)

    def apply(self, vit: PatchViT, seed: int) -> None:
        with seed_random(seed, "lora"):
            for block, attention in enumerate(attentions(vit)):
                qkv = attention.qkv
                sizes = (qkv.in_features, qkv.out_features // 3, self.rank, self.alpha / self.rank)
                lora_q, lora_v = _LowRank(*sizes), _LowRank(*sizes)
                vit.add(f"blocks.{block}.attn.qkv.lora_q", lora_q)
                vit.add(f"blocks.{block}.attn.qkv.lora_v", lora_v)
                qkv.register_forward_hook(partial(_add, lora_q, lora_v))


class _LowRank(nn.Module):
    def __init__(self, width: int, inner_width: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, width))
        self.b = nn.Parameter(torch.zeros(inner_width, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.scale * nn.functional.linear(nn.functional.linear(x_BND, self.a), self.b)


def _add(lora_q: nn.Module, lora_v: nn.Module, qkv: nn.Module, args: tuple[Tensor, ...], out_BNI: Tensor) -> Tensor:
    """A forward hook: its result replaces the projection's output."""
    (x_BND,) = args
    q, k, v = out_BNI.chunk(3, dim=-1)
    return torch.cat([q + lora_q(x_BND), k, v + lora_v(x_BND)], dim=-1)
