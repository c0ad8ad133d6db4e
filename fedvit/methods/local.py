"""Local: every device trains a model of its own, and no tensors are sent."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.methods.base import GroupRule, Method, ServerRule
from fedvit.methods.rules.nothing import Nothing
from fedvit.models.vit import PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """The baseline without federation, also called SingleSet-Full; all devices begin with the same model.

    Source: FedPerfix, arXiv:2308.09160, and EFTViT, arXiv:2412.00334. As in FedPerfix a device trains only in rounds
    whose cohort it is in. FedTP's released code trains all devices in every round: run option `cohort = 1.0`.
    """

    source: ClassVar[str] = "baseline of FedPerfix, arXiv:2308.09160"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("model", Role.LOCAL, ("*",)),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return Nothing()
