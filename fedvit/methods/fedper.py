"""FedPer: every device keeps a head of its own."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD, personal
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    """The head is local, the base is averaged, and both are trained together.

    Source: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818. The rows "FedRep"
    in FedPerfix's tables are this method. Differs from the paper: one personal layer, the head.
    """

    source: ClassVar[str] = "Arivazhagan et al., arXiv:1912.00818"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal(*HEAD)
