"""FedAvg: every device trains the whole model, the server averages."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule, Method, ServerRule
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Everything is shared and averaged.

    Source: McMahan et al., arXiv:1602.05629. Differs from the paper: weights are normalised over the
    devices whose result was accepted, so a straggler does not shrink the model toward zero.
    """

    source: ClassVar[str] = "McMahan et al., arXiv:1602.05629"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("model", Role.SHARED, ("*",)),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return WeightedMean()
