"""A method: only layer norms and the head are trained, and the server moves them by an optimizer."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule, StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedopt import FedOpt
from fedvit.methods.parts import NORMS, on_frozen_backbone
from fedvit.models.vit import PatchViT
from fedvit.program import Train


@dataclass(frozen=True, kw_only=True)
class NormsAlone(FedOpt):
    """A device minimises its loss + l1 |head|; layer norms and the head are shared, all other tensors stay.

    Source: none, an example of docs/plugins.md.
    """

    source: ClassVar[str] = "an example of docs/plugins.md"

    l1: Annotated[float, Meta(ge=0)] = 1e-4  # strength of the penalty, whose gradient needs the operators beside

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return on_frozen_backbone(*NORMS)

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        plain = super().objective(vit, phase, tensors, inputs)
        return plain._replace(loss=plain.loss + self.l1 * tensors["head.weight"].abs().sum())
