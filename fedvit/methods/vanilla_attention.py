"""Vanilla attention: every device keeps its own attention, learnt without a hypernetwork or adapters."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedvit.methods.base import GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import ATTENTION, HEAD, QKV, personal
from fedvit.models.vit import ModelPart, PatchViT


@dataclass(frozen=True, kw_only=True)
class VanillaAttention(FedAvg):
    """Only the roles differ from FedAvg's.

    Source: "attention" is Vanilla Attention of FedPerfix, arXiv:2308.09160 (queries, keys, values and output
    projection with their biases, and the head); "qkv" is Vanilla Personalized-T of FedTP, arXiv:2211.01572 (the
    weights that make queries, keys and values; biases, output projection and head are averaged).
    """

    source: ClassVar[str] = "FedPerfix, arXiv:2308.09160; FedTP, arXiv:2211.01572"

    parts: Literal["attention", "qkv"] = "attention"  # what stays on the device

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {"attention"}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return personal(*ATTENTION, *HEAD) if self.parts == "attention" else personal(*QKV)
