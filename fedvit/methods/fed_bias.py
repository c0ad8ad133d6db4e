"""Fed-Bias: only biases and the head are trained and averaged."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import BIASES, on_frozen_backbone
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedBias(FedAvg):
    """BitFit on a frozen, normally pretrained backbone; the shifts of LayerNorms are biases, too.

    Source: Zaken et al., "BitFit", arXiv:2106.10199; baseline of EFTViT, arXiv:2412.00334.
    """

    source: ClassVar[str] = "Zaken et al., arXiv:2106.10199; baseline of EFTViT, arXiv:2412.00334"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone(*BIASES)
