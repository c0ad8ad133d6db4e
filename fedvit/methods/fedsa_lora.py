"""FedSA-LoRA: of the low-rank additions the first factor is shared, and the second one stays on the device."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.parts import on_frozen_backbone
from fedvit.models.vit import PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class FedSaLora(FedLora):
    """A and the head are trained and averaged, B is trained and stays.

    Source: Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025,
    arXiv:2410.01463. Differs from the paper: the head is shared.
    """

    source: ClassVar[str] = "Guo et al., ICLR 2025, arXiv:2410.01463"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        own = GroupRule("own", Role.LOCAL, ("blocks.*.attn.qkv.lora_?.b",))
        return (own, *on_frozen_backbone("blocks.*.attn.qkv.lora_?.a"))
