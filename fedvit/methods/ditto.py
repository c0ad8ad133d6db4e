"""Ditto: FedAvg, and beside it on each device a model of its own that a spring holds near the shared one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import Gathered, GroupRule, Images, StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.twins import TWIN, name_twins, select_twins
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

OWN = "own"
"""The graph that trains the personal model."""


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """The shared w learns as in FedAvg; the personal v minimises f(v) + lam / 2 |v - w|^2, and answers.

    w is the model that the device got at the start of the round.
    Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
    arXiv:2012.04221, algorithm 1. Differs from the paper: weights of the mean as in FedAvg; both models have the same
    optimizer and rate.
    """

    source: ClassVar[str] = "Li et al., ICML 2021, arXiv:2012.04221"

    lam: Annotated[float, Meta(ge=0)] = 1.0  # strength of the spring; 0 is training alone
    own_epochs: Annotated[int, Meta(ge=1)] | None = None  # of the personal model; None: epochs

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return name_twins(vit.tensors())

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("twin", Role.LOCAL, (f"{TWIN}*",)), GroupRule("model", Role.SHARED, ("*",)))

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        if phase.graph != OWN:
            return super().objective(vit, phase, tensors, inputs)
        twin = select_twins(tensors)
        plain = super().objective(vit, phase, twin, inputs)
        pulls = [(twin[name] - start).square().sum() for name, start in inputs.anchors.items()]
        return plain._replace(loss=plain.loss + 0.5 * self.lam * sum(pulls), shown=plain.loss)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        return self.forward(vit, select_twins(tensors), images).logits

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        own = self.phase(("twin",), graph=OWN, anchors=("model",), epochs=self.own_epochs or self.epochs)
        return (self.phase(("model",)), own)
