"""Vanilla prefix tuning: keys and values in every block that no device shares, without FedPerfix's bottleneck."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedvit.model_options import check_choice, check_number, check_whole
from fedvit.models.attention import KeysValues, open_attentions
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FreePrefix(ModelPatch):
    """The ablation Prefix-Z (`init` zero) and Prefix-R (random) of FedPerfix, arXiv:2308.09160, Table 6.

    "literal" is the paper's text: `tokens` free keys and values per block, before those of the tokens. Zeros still
    change a model (keys of logit 0), and rows that begin equal stay equal: their effective number is 1.
    "linear" is the released code and the published figures: s (x W + b) is added to keys and values; with zeros it
    begins as the base model.
    Tensors: `blocks.i.attn.prefix.{key,value}`, or `blocks.i.attn.prefix.linear.{weight,bias}`.
    """

    form: Literal["literal", "linear"] = "literal"
    init: Literal["zero", "random"] = "random"
    tokens: int = 10  # "literal" only; the paper does not say
    scale: float = 1.5  # "linear" only

    def __post_init__(self) -> None:
        check_choice("FreePrefix", "form", self.form, ("literal", "linear"))
        check_choice("FreePrefix", "init", self.init, ("zero", "random"))
        check_whole("FreePrefix", "tokens", self.tokens)
        check_number("FreePrefix", "scale", self.scale)

    def apply(self, vit: PatchViT, seed: int) -> None:
        attentions = open_attentions(vit)
        with seed_random(seed, "prefix"):
            for block, attention in enumerate(attentions):
                prefix = self._make(vit.width, attention.inner_width)
                if self.init == "zero":
                    for value in prefix.parameters():
                        nn.init.zeros_(value)
                vit.add(f"blocks.{block}.attn.prefix", prefix)

    def _make(self, width: int, inner_width: int) -> KeysValues:
        if self.form == "literal":
            return _Rows(self.tokens, inner_width)
        return _Projection(width, inner_width, self.scale)


class _Rows(KeysValues):
    def __init__(self, tokens: int, inner_width: int) -> None:
        super().__init__(joined=True)
        bound = inner_width**-0.5  # as the weight of a torch Linear of this shape
        self.key = nn.Parameter(torch.empty(tokens, inner_width).uniform_(-bound, bound))
        self.value = nn.Parameter(torch.empty(tokens, inner_width).uniform_(-bound, bound))

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        batch = x_BND.shape[0]
        return self.key.expand(batch, -1, -1), self.value.expand(batch, -1, -1)


class _Projection(KeysValues):
    def __init__(self, width: int, inner_width: int, scale: float) -> None:
        super().__init__(joined=False)
        self.scale = scale
        self.linear = nn.Linear(width, 2 * inner_width)

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (self.scale * self.linear(x_BND)).chunk(2, dim=-1)
        return keys, values
