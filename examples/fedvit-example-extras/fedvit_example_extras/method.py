"""A method: only layer norms and the head are trained, and the server moves them by an optimizer."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule
from fedvit.methods.fedopt import FedOpt
from fedvit.methods.parts import NORMS, on_frozen_backbone
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class NormsAlone(FedOpt):
    """Layer norms and the head are shared; all other tensors stay as the run begins.

    Source: none, an example of docs/plugins.md.
    """

    source: ClassVar[str] = "an example of docs/plugins.md"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone(*NORMS)
