"""FedBN for Transformers: every device keeps its own normalisation."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import NORMS, personal
from fedvit.models.vit import ModelPart, PatchViT


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """Scale and shift of all LayerNorms are local, the rest is averaged.

    Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    arXiv:2102.07623. Differs from the paper: a ViT has no batch normalisation; as in FedPerfix, arXiv:2308.09160,
    LayerNorm takes its place.
    """

    source: ClassVar[str] = "Li et al., arXiv:2102.07623"

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {"norms"}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal(*NORMS)
