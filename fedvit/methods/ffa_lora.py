"""FFA-LoRA: of the low-rank additions only the second factor is trained, so that the mean of updates is exact."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.parts import on_frozen_backbone
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FfaLora(FedLora):
    """A keeps its random start values, which are sent once; B and the head are trained and averaged.

    Source: Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv:2403.12313.
    """

    source: ClassVar[str] = "Sun et al., ICLR 2024, arXiv:2403.12313"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone("blocks.*.attn.qkv.lora_?.b")
