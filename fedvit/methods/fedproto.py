"""FedProto: devices share the mean features of each class, and keep their models to themselves."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedvit.methods.base import Gathered, GroupRule, Images, ServerRule
from fedvit.methods.calculus import Named
from fedvit.methods.class_sums import KNOWN, PROTOTYPES, SUMS, MeansOfClasses, WithPrototypes, read_features
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

FAR = 1e9
"""Squared distance of a class without a prototype."""


@dataclass(frozen=True, kw_only=True)
class FedProto(WithPrototypes):
    """The model stays on the device, and its features are pulled to the prototypes. The class whose prototype is
    nearest answers.

    Source: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
    arXiv:2105.00243, algorithm 1. Differs from the paper: the distance is squared and divided by the width, as in its
    code; a class that no device of a round has keeps its prototype; the head answers before the first round.
    """

    source: ClassVar[str] = "Tan et al., AAAI 2022, arXiv:2105.00243"

    answer_by: Literal["prototypes", "head"] = "prototypes"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("prototypes", Role.GLOBAL, (PROTOTYPES, KNOWN)),
            GroupRule("sums", Role.SHARED, (SUMS,)),
            GroupRule("model", Role.LOCAL, ("*",)),
        )

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        features, logits = read_features(vit, tensors, images)
        if self.answer_by == "head":
            return logits
        prototypes, known = tensors[PROTOTYPES], tensors[KNOWN]
        squares = features.square().sum(dim=1, keepdim=True) + prototypes.square().sum(dim=1)
        nearness = 2 * features @ prototypes.T - squares - FAR * (1 - known)
        any_known = known.sum().clamp(max=1)
        return any_known * nearness + (1 - any_known) * logits

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",)), self.sum_phase())

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeansOfClasses()
