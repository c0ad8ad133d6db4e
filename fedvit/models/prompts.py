"""Visual prompts: learnable tokens beside those of the image."""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.model_options import check_choice, check_whole
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT, TokenHooks


@dataclass(frozen=True, kw_only=True)
class Prompts(ModelPatch):
    """`tokens` prompts K of width D, without positions; the classifier reads the class token as before.

    Source: Jia et al., "Visual Prompt Tuning", arXiv:2203.12119 ("shallow" and "deep"); FedPerfix, arXiv:2308.09160,
    Table 6 ("appended"). Values begin uniform in +-sqrt(6 / (3 P^2 + D)), P the side of a patch (VPT's rule).
    Differs from both: no dropout on prompts.
    "shallow": (K, D), between the class token (and registers) and the patches, once, before block 0; what pFedPG
    generates. "deep": (blocks, K, D), the same place, but every block gets its own and the last block's outputs of
    them are discarded. "appended": (blocks, K, D), at the end, dropped again after the block.
    Tensor: `prompts.tokens`.
    """

    tokens: int = 10
    placement: Literal["shallow", "deep", "appended"] = "shallow"

    def __post_init__(self) -> None:
        check_whole("Prompts", "tokens", self.tokens)
        check_choice("Prompts", "placement", self.placement, tuple(_PLACES))

    def apply(self, vit: PatchViT, seed: int) -> None:
        if not vit.pools_class_token:
            raise ConfigError(
                "FV1112",
                f"model {vit.name!r} cannot have prompts: its head reads no class token, but all tokens pooled",
            )
        shape = (self.tokens, vit.width) if self.placement == "shallow" else (vit.depth, self.tokens, vit.width)
        bound = math.sqrt(6 / (3 * vit.patch_size**2 + vit.width))
        with seed_random(seed, "prompts"):
            values = torch.empty(shape).uniform_(-bound, bound)
        vit.add("prompts", _PLACES[self.placement](values, vit.prefix_tokens))


class _Prompts(TokenHooks):
    def __init__(self, values: Tensor, first: int) -> None:
        super().__init__()
        self.first = first  # tokens in front of the prompts
        self.tokens = nn.Parameter(values)

    def _insert(self, x_BND: Tensor, prompts_KD: Tensor, replaced: int) -> Tensor:
        """Prompts in the place of the `replaced` tokens from `first` on."""
        sizes = [self.first, replaced, x_BND.shape[1] - self.first - replaced]
        before, _, after = x_BND.split(sizes, dim=1)
        return torch.cat([before, prompts_KD.expand(x_BND.shape[0], -1, -1), after], dim=1)


class _Shallow(_Prompts):
    def after_embedding(self, x_BND: Tensor) -> Tensor:
        return self._insert(x_BND, self.tokens, 0)


class _Deep(_Prompts):
    def after_embedding(self, x_BND: Tensor) -> Tensor:
        return self._insert(x_BND, self.tokens[0], 0)

    def before_block(self, block: int, x_BND: Tensor) -> Tensor:
        return x_BND if block == 0 else self._insert(x_BND, self.tokens[block], self.tokens.shape[1])


class _Appended(_Prompts):
    def before_block(self, block: int, x_BND: Tensor) -> Tensor:
        return torch.cat([x_BND, self.tokens[block].expand(x_BND.shape[0], -1, -1)], dim=1)

    def after_block(self, block: int, x_BND: Tensor) -> Tensor:
        prompts = self.tokens.shape[1]
        kept, _ = x_BND.split([x_BND.shape[1] - prompts, prompts], dim=1)
        return cast(Tensor, kept)


_PLACES: dict[str, type[_Prompts]] = {"shallow": _Shallow, "deep": _Deep, "appended": _Appended}
