"""A part of the model of which the server has k, and of which a device trains and sends one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import (
    PREDICT,
    Gathered,
    GroupRule,
    Images,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
)
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights, move_tensors
from fedvit.models.model_patch import seed_random
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Role, Train

CHOICE, OTHER = "choice", "other"
TAKE = "take"
"""The graph that puts the chosen part into the model."""


def name_other(number: int, name: str) -> str:
    """Return the name of a tensor in part `number`; part 0 is in the model itself."""
    return f"{OTHER}{number}.{name}" if number else name


@dataclass(frozen=True, kw_only=True)
class OneOfK(FedAvg, ABC):
    """A phase of the method sets `choice`, k numbers: 1 for the part that the device chooses, 0 for the others.

    The device then trains the model with this part, and returns the model's change and its choice. The server averages
    each part over the devices that chose it, and the rest of the model over all. A device answers with the part that
    it chose last; before that with the first one.
    """

    one_gradient: ClassVar[bool] = False

    models: Annotated[int, Meta(ge=2, le=64)] = 2  # parts to choose from (paper: k)
    spread: Annotated[float, Meta(gt=0, le=1)] = 0.1  # how far they begin from the first; 1: drawn anew

    @abstractmethod
    def list_of_k(self, vit: PatchViT) -> list[str]:
        """Names of the tensors of which there are k."""

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        extra, values = {CHOICE: torch.zeros(self.models)}, vit.tensors()
        for number in range(1, self.models):
            with seed_random(vit.seed, f"{OTHER}{number}"):
                for name in self.list_of_k(vit):
                    value, mean = values[name], values[name].mean()
                    # both parts together have the tensor's own mean and deviation
                    near = mean + (1 - self.spread**2) ** 0.5 * (value - mean)
                    drawn = value.std(correction=0) * torch.randn_like(value)
                    extra[name_other(number, name)] = near + self.spread * drawn
        return extra

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        # the server's choice stays zero, so that a device's change is its choice
        return (
            GroupRule("choice", Role.LOCAL if self.novel else Role.SHARED, (CHOICE,)),
            GroupRule("others", Role.GLOBAL, (f"{OTHER}*",)),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != TAKE:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        taken = {**updated, **self.take(vit, {**fixed, **updated})}
        return StepResult(self.objective(vit, phase, taken, inputs).loss, taken, {})

    def take(self, vit: PatchViT, tensors: Named) -> dict[str, Tensor]:
        """Return the chosen part, by the names of the first one."""
        others = tensors[CHOICE][1:].unbind()
        first = 1 - tensors[CHOICE][1:].sum()
        taken = {name: first * tensors[name] for name in self.list_of_k(vit)}
        for number, share in enumerate(others, 1):
            taken = {name: value + share * tensors[name_other(number, name)] for name, value in taken.items()}
        return taken

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        return self.forward(vit, {**tensors, **self.take(vit, tensors)}, images).logits

    def generic_logits(self, vit: PatchViT, tensors: Named, images: Images) -> None:
        """Return None: there is no one model for everybody."""

    def take_phase(self) -> Train:
        return self.phase(("model",), graph=TAKE, epochs=1, steps=1, slots=())

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return Evaluate(graph=PREDICT, kept=("choice",))

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanOfEachPart(models=self.models, of_k=frozenset(self.list_of_k(vit)))


@dataclass(frozen=True, kw_only=True)
class MeanOfEachPart(WeightedMean):
    """Averages a part over the devices that chose it; one that nobody chose stays."""

    models: int
    of_k: frozenset[str]

    why_never_late = "its server needs the change of its newest tensors"
    why_no_regions = "its server averages the devices of each choice"
    why_not_measured = "devices begin at different models, and send changes of the first one"
    averages = False

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        weights = cohort_weights(uploads, context.round)
        first, chosen = state.tensors, 0
        rest = [n for n in first if n != CHOICE and n not in self.of_k and not n.startswith(OTHER)]
        steps = self.average(ServerState({name: first[name] for name in rest}), uploads, context)
        for number in range(self.models):
            own = [one for one in uploads if weights[one.device] and np.argmax(one.load()[CHOICE]) == number]
            if not own:
                continue
            chosen += 1
            changes = self.average(ServerState({name: first[name] for name in self.of_k}), own, context)
            for name, change in changes.items():
                part = name_other(number, name)
                steps[part] = change + np.subtract(first[name], first[part], dtype=np.float64)
        updated, figures = move_tensors(state, steps)
        return updated, {**figures, "models_chosen": float(chosen)}
