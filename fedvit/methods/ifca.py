"""IFCA: the server keeps k models, and a device trains the one that has the lowest loss on its images."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedvit.methods.base import StepInputs, StepResult
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.losses import sample_losses
from fedvit.methods.one_of_k import CHOICE, OneOfK, name_other
from fedvit.methods.parts import HEAD
from fedvit.models.vit import PatchViT
from fedvit.program import Train

CHOOSE = "choose"
"""The graph that adds up the loss of each model."""
TOTAL = "total"


@dataclass(frozen=True, kw_only=True)
class IFCA(OneOfK):
    """A device computes its loss with each of k models, trains the best one, and returns it and its choice.

    Source: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, arXiv:2006.04088,
    algorithm 1, averaging models; with `of_k` "head" its weight sharing. Differs from the paper: weights of the mean
    as in FedAvg; models begin near the first one, which may be pretrained.
    """

    source: ClassVar[str] = "Ghosh et al., NeurIPS 2020, arXiv:2006.04088"

    of_k: Literal["model", "head"] = "model"  # what each group of devices has of its own

    def list_of_k(self, vit: PatchViT) -> list[str]:
        patterns = HEAD if self.of_k == "head" else ("*",)
        names = [name for name, _ in vit.vit.named_parameters()]
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        choose = self.phase(("choice",), graph=CHOOSE, epochs=1, slots=(TOTAL,))
        return (choose, self.take_phase(), self.phase(("model",)))

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != CHOOSE:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        losses = []
        for number in range(self.models):
            part = {name: fixed[name_other(number, name)] for name in self.list_of_k(vit)}
            logits = self.forward(vit, {**fixed, **part}, inputs.images).logits
            losses.append((sample_losses(vit, logits, inputs.labels) * inputs.weight).sum())
        total = calculus.inputs[f"slot/{TOTAL}/{CHOICE}"] + torch.stack(losses)
        calculus.slots[f"{TOTAL}/{CHOICE}"] = total
        better = (total.unsqueeze(0) < total.unsqueeze(1)).to(total.dtype).sum(dim=1)
        # a loss that is not a number is never the lowest
        best = (better == 0).to(total.dtype) * (total == total).to(total.dtype)
        chosen: list[Tensor] = []
        for is_best in best.unbind():
            chosen.append(is_best * (1 - sum(chosen)))  # the first of equal ones
        loss = losses[0] / inputs.weight.sum().clamp(min=1)
        return StepResult(loss, {CHOICE: torch.stack(chosen)}, {})
