"""Layer sensitivity: which part of the model gains most from staying on the device?"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import ATTENTION, HEAD, MLP, NORMS, PATCH_EMBED, POS_EMBED, Patterns, personal
from fedvit.models.vit import ModelPart, PatchViT

Part = Literal["patch_embed", "pos_embed", "norm", "attn", "mlp", "head"]

_PATTERNS: dict[Part, Patterns] = {
    "patch_embed": PATCH_EMBED,
    "pos_embed": POS_EMBED,
    "norm": NORMS,
    "attn": ATTENTION,
    "mlp": MLP,
    "head": HEAD,
}
_NEEDS: dict[Part, ModelPart] = {  # a head has every model
    "patch_embed": "patches",
    "pos_embed": "positions",
    "norm": "norms",
    "attn": "attention",
    "mlp": "mlp",
}


@dataclass(frozen=True, kw_only=True)
class PersonalPart(FedAvg):
    """One part of the model is local, alone or with the head; the rest is averaged.

    Source: FedPerfix, arXiv:2308.09160, Table 1. Its "overall" is the mean of the accuracies with and without the
    head. As in its code "pos_embed" leaves the class token shared.
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160, Table 1"

    part: Part = "attn"
    with_head: bool = False

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {_NEEDS[part] for part in (self.part,) if part in _NEEDS}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal(*_PATTERNS[self.part], *(HEAD if self.with_head else ()))
