"""Fed-Head: only the head is trained and averaged."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import on_frozen_backbone
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedHead(FedAvg):
    """A linear probe of a frozen, normally pretrained backbone.

    Source: baseline of EFTViT, arXiv:2412.00334.
    """

    source: ClassVar[str] = "baseline of EFTViT, arXiv:2412.00334"
    is_probe: ClassVar[bool] = True

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone()
