"""FedPerfix's adapter: keys and values of each token get an addition made of the token itself."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedvit.model_options import check_choice, check_number, check_whole
from fedvit.models.attention import KeysValues, open_attentions
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class KVAdapter(ModelPatch):
    """In every block: [P_k, P_v] = up(tanh(down(x))) of the attention's input x; Q is untouched.

    Source: Sun et al., "FedPerfix: Towards Partial Model Personalization of Vision Transformers in Federated
    Learning", arXiv:2308.09160. The released code adds s P to the token's own keys and values; equations 3 to 6
    read literally are "concat": s P are further keys, twice as many as tokens. Both layers begin as torch's Linear
    does, so a new model differs from its base.
    Tensors: `blocks.i.attn.adapter.{down,up}.{weight,bias}`.
    """

    bottleneck: int = 256  # released configuration (paper: b)
    scale: float = 1.5  # released configuration (paper: s); 0 with "add" is the base model
    mode: Literal["add", "concat"] = "add"

    def __post_init__(self) -> None:
        check_whole("KVAdapter", "bottleneck", self.bottleneck)
        check_number("KVAdapter", "scale", self.scale)
        check_choice("KVAdapter", "mode", self.mode, ("add", "concat"))

    def apply(self, vit: PatchViT, seed: int) -> None:
        attentions = open_attentions(vit)
        with seed_random(seed, "kv_adapter"):
            for block, attention in enumerate(attentions):
                made = _Adapter(vit.width, self.bottleneck, attention.inner_width, self.scale, self.mode == "concat")
                vit.add(f"blocks.{block}.attn.adapter", made)


class _Adapter(KeysValues):
    def __init__(self, width: int, bottleneck: int, inner_width: int, scale: float, joined: bool) -> None:
        super().__init__(joined)
        self.scale = scale
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, 2 * inner_width)

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (self.scale * self.up(torch.tanh(self.down(x_BND)))).chunk(2, dim=-1)
        return keys, values
