"""Personal prompts: every device has tokens of its own in every block of the common model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD, personal
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class PersonalPrompts(FedAvg):
    """Prompts and head are local, the backbone is trained and averaged.

    Source: FedPerfix, arXiv:2308.09160, Table 6 (its released code does not run). Prompts are appended to each
    block's tokens and dropped behind it. Differs from the paper: no dropout on prompts.
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160, Table 6"

    epochs: Annotated[int, Meta(ge=1)] = 10
    batch_size: Annotated[int, Meta(ge=1)] = 64

    tokens: Annotated[int, Meta(ge=1)] = 10  # prompts of a block

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens, placement="appended"),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal("prompts.*", *HEAD)
