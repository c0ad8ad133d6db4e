"""Personal adapters: every device has a bottleneck of its own behind the MLPs of the common model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD, personal
from fedvit.models.mlp_adapter import MlpAdapter
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class PersonalAdapters(FedAvg):
    """Adapters and head are local, the rest is averaged.

    Source: FedPerfix, arXiv:2308.09160, Table 6. Its released code has one adapter for all blocks that begins with
    zeros everywhere, so that only one bias vector ever learns; `shared_dead` reproduces that.
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160, Table 6"

    epochs: Annotated[int, Meta(ge=1)] = 10
    batch_size: Annotated[int, Meta(ge=1)] = 64

    bottleneck: Annotated[int, Meta(ge=1)] = 64  # the paper does not say
    shared_dead: bool = False

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (MlpAdapter(bottleneck=self.bottleneck, shared_dead=self.shared_dead),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal("blocks.*.mlp.adapter.*", "mlp_adapter.*", *HEAD)
