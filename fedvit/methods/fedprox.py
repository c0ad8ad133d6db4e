"""FedProx: FedAvg with a spring that holds each device near the round's start."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.models.vit import PatchViT
from fedvit.program import Train


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """A device minimises its loss + mu / 2 * |w - w_start|^2.

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", arXiv:1812.06127. Differs from the paper:
    every device runs the same number of epochs. The loss that devices report includes the spring.
    """

    source: ClassVar[str] = "Li et al., arXiv:1812.06127"

    mu: Annotated[float, Meta(ge=0)] = 0.01  # strength of the spring; 0 is FedAvg

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        plain = super().objective(vit, phase, tensors, inputs)
        pulls = [(tensors[name] - start).square().sum() for name, start in inputs.anchors.items()]
        return plain._replace(loss=plain.loss + 0.5 * self.mu * sum(pulls))

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",), anchors=("model",)),)
