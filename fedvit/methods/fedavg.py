"""FedAvg: every device trains the whole model, the server averages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedvit.methods.base import Forward, GroupRule, Images, Method, ServerRule
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Everything is shared and averaged.

    Source: McMahan et al., arXiv:1602.05629. Differs from the paper: weights are normalised over the
    devices whose result was accepted, so a straggler does not shrink the model toward zero.
    """

    source: ClassVar[str] = "McMahan et al., arXiv:1602.05629"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("model", Role.SHARED, ("*",)),)

    def forward(self, vit: PatchViT, tensors: Mapping[str, Tensor], images: Images) -> Forward:
        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_blocks(vit.embed(*images), 0, vit.depth))

        return Forward(vit.call(tensors, body), {})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (
            Train(graph="train", groups=("model",), slots=self.optimizer_rule().slots, epochs=self.epochs, lr=self.lr),
        )

    def server_rule(self) -> ServerRule:
        return WeightedMean()
