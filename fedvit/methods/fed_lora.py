"""Fed-LoRA: low-rank additions to queries and values are trained and averaged."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import on_frozen_backbone
from fedvit.model_options import LORA_ALPHA
from fedvit.models.lora import Lora
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT

ADDITIONS = "blocks.*.attn.qkv.lora_?.*"
"""Pattern of the names of both factors of all additions."""


@dataclass(frozen=True, kw_only=True)
class FedLora(FedAvg):
    """LoRA on a frozen, normally pretrained backbone, and the head.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685; baseline of EFTViT,
    arXiv:2412.00334, whose published FLOPs are those of rank 16. The server averages both factors separately, which
    is not the average of their products.
    """

    source: ClassVar[str] = "Hu et al., arXiv:2106.09685; baseline of EFTViT, arXiv:2412.00334"

    rank: Annotated[int, Meta(ge=1)] = 16
    alpha: float = LORA_ALPHA  # the addition is multiplied by alpha / rank

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Lora(rank=self.rank, alpha=self.alpha),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone(ADDITIONS)
