"""Fed-Prompt, also called FedVPT: a few tokens in front of the first block are trained and averaged."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import on_frozen_backbone
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class FedPrompt(FedAvg):
    """Shallow prompts on a frozen, normally pretrained backbone.

    Source: Jia et al., "Visual Prompt Tuning", arXiv:2203.12119; baseline of EFTViT, arXiv:2412.00334 (whose head is
    averaged), and of pFedPG, arXiv:2308.15367 (whose published traffic is that of a local head).
    """

    source: ClassVar[str] = "Jia et al., arXiv:2203.12119; baseline of EFTViT, arXiv:2412.00334"
    placement: ClassVar[Literal["shallow", "deep"]] = "shallow"

    tokens: Annotated[int, Meta(ge=1)] = 10  # prompts (pFedPG: K)
    head: Literal["shared", "local"] = "shared"

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens, placement=self.placement),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone("prompts.*", head=Role(self.head))
