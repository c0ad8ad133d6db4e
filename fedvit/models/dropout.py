"""Dropout whose masks follow from a number for each sample, so that every engine draws the same.

A device draws the numbers (the graph's input `batch/seeds`), and a step computes the masks from them in whole numbers,
which have no rounding. Letters in names: B batch, N tokens, D width.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedvit.model_options import check_number
from fedvit.models.model_patch import plain_blocks
from fedvit.models.recompute import SampleSeeds
from fedvit.models.vit import PatchViT, TokenHooks

PRIME = 2**31 - 1
"""Masks are computed modulo this; a product of two such numbers fits into 64 bits."""
SPREAD = 2_654_435_761
"""2^32 divided by the golden ratio: its multiples are spread evenly."""
PLACE_BITS = 24
"""Bits of a value's number within one sample; above them is the number of the place in the model."""


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """In training, set a share of the values to 0 and divide the others by the share that stays.

    The places are those of FedTP's released model: behind the embedding with its positions, behind the output
    projection of every attention, and in every MLP behind the activation and behind the second layer.
    Source: Srivastava et al., JMLR 15 (2014).
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        check_number("Dropout", "rate", self.rate)

    def apply(self, vit: PatchViT, seed: int) -> None:
        """Replace timm's dropout modules. Raises ConfigError for blocks that are not plain ones."""
        blocks = plain_blocks(vit)
        vit.add("dropout", _Embedded(vit.seeds, self.rate))
        for number, block in enumerate(blocks):
            attention, mlp = cast(Any, block).attn, cast(Any, block).mlp
            attention.proj_drop = _Dropped(vit.seeds, self.rate, 3 * number + 1)
            mlp.drop1 = _Dropped(vit.seeds, self.rate, 3 * number + 2)
            mlp.drop2 = _Dropped(vit.seeds, self.rate, 3 * number + 3)


def drop_values(x_BND: Tensor, seeds_B: Tensor, rate: float, place: int) -> Tensor:
    """`x_BND` with a share `rate` of its values set to 0, the others divided by 1 - rate."""
    _, tokens, width = x_BND.shape
    device = x_BND.device
    rows_N1 = torch.arange(tokens, device=device).unsqueeze(1) * width
    numbers_ND = rows_N1 + torch.arange(width, device=device) + (place << PLACE_BITS)
    spread_ND = torch.remainder(numbers_ND * SPREAD, PRIME)
    mixed_BND = torch.remainder(spread_ND + seeds_B.reshape(-1, 1, 1), PRIME)
    for _ in range(2):  # squares, as sums alone would give every sample the same mask in another order
        mixed_BND = torch.remainder(mixed_BND * mixed_BND + spread_ND, PRIME)
    kept_BND = (mixed_BND > int(rate * PRIME)).to(x_BND.dtype)
    return x_BND * kept_BND * (1 / (1 - rate))


class _Dropped(nn.Module):
    """A module in the place of timm's dropout."""

    def __init__(self, seeds: SampleSeeds, rate: float, place: int) -> None:
        super().__init__()
        self.seeds, self.rate, self.place = seeds, rate, place

    def forward(self, x_BND: Tensor) -> Tensor:
        seeds_B = self.seeds.now
        return x_BND if seeds_B is None else drop_values(x_BND, seeds_B, self.rate, self.place)


class _Embedded(TokenHooks):
    def __init__(self, seeds: SampleSeeds, rate: float) -> None:
        super().__init__()
        self.drop = _Dropped(seeds, rate, 0)

    def after_embedding(self, x_BND: Tensor) -> Tensor:
        return cast(Tensor, self.drop(x_BND))
