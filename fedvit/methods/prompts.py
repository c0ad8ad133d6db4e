"""Personal prompts: every device has tokens of its own in every block of the common model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

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

    Source: FedPerfix, arXiv:2308.09160, Table 6. The paper's text (section 5.3) appends prompts to the input
    embeddings: `placement` "shallow", with 10 tokens for the whole model. Its released code, which does not run,
    appends prompts of its own to each block's tokens and drops them behind it: "appended". Differs from both: no
    dropout on prompts; shallow prompts stand between the class token and the patches, which without positions of their
    own is the same as behind them.
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160, Table 6"

    epochs: Annotated[int, Meta(ge=1)] = 10
    batch_size: Annotated[int, Meta(ge=1)] = 64

    tokens: Annotated[int, Meta(ge=1)] = 10  # prompts of a block, or of the model if they are shallow
    placement: Literal["appended", "shallow"] = "appended"  # in each block, or once behind the embedding

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens, placement=self.placement),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal("prompts.*", *HEAD)
