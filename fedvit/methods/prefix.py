"""Vanilla prefix-tuning: FedPerfix with prefixes that are parameters, not made of the tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD, personal
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prefix import FreePrefix
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class PersonalPrefix(FedAvg):
    """Prefixes and head are local, the rest is averaged: Prefix-Z (`init` "zero") and Prefix-R ("random").

    Source: FedPerfix, arXiv:2308.09160, Table 6. `form` "literal" is the paper's text, "linear" what its published
    figures were made with. Prefixes of the literal form that begin at zero stay equal to each other: they are one.
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160, Table 6"

    epochs: Annotated[int, Meta(ge=1)] = 10
    batch_size: Annotated[int, Meta(ge=1)] = 64

    form: Literal["literal", "linear"] = "literal"
    init: Literal["zero", "random"] = "random"
    tokens: Annotated[int, Meta(ge=1)] = 10  # prefixes of a block; "literal" only, the paper does not say how many
    scale: float = 1.5  # "linear" only

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (FreePrefix(form=self.form, init=self.init, tokens=self.tokens, scale=self.scale),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal("blocks.*.attn.prefix.*", *HEAD)
