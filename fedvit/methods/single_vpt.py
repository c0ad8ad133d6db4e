"""SingleSet-VPT: every device tunes prompts and a head of its own on a frozen backbone; no tensors are sent."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.local import Local
from fedvit.methods.parts import on_frozen_backbone
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class SingleVpt(Local):
    """Fed-Prompt without a federation.

    Source: Jia et al., "Visual Prompt Tuning", arXiv:2203.12119; baseline of pFedPG, arXiv:2308.15367.
    """

    source: ClassVar[str] = "Jia et al., arXiv:2203.12119; baseline of pFedPG, arXiv:2308.15367"

    tokens: Annotated[int, Meta(ge=1)] = 10

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone("prompts.*", tuned=Role.LOCAL, head=Role.LOCAL)
