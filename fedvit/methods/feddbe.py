"""FedDBE: each device keeps the bias of its features' mean to itself, and pulls that mean to everybody's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import (
    Forward,
    GroupRule,
    Images,
    Method,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
    cross_entropy,
    run_model,
)
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.class_sums import find_unit, one_hot
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean, move_tensors
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

OWN_BIAS, RUNNING, CONSENSUS, AGREED = "own_bias", "running_mean", "consensus", "agreed"
FEATURES = "features"


@dataclass(frozen=True, kw_only=True)
class FedDBE(FedAvg):
    """The head reads f(x) + b: b is the device's own. A step minimises the loss + kappa / 2 |m - c|^2 / D.

    m <- (1 - mu) m + mu mean f(x) of the batch, from 0 in each round. c, the consensus, is the mean over devices of
    what m comes to in the first round.
    Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023,
    arXiv:2311.14975, eq. 3 to 7; constants and the restart of m are those of its code. Differs from both: the round
    that finds the consensus trains b and counts as the first, and is that of its cohort alone.
    """

    source: ClassVar[str] = "Zhang et al., NeurIPS 2023, arXiv:2311.14975"
    one_gradient: ClassVar[bool] = False
    why_one_class = "its mean of features is a sum by class"

    kappa: Annotated[float, Meta(ge=0)] = 1.0  # strength of the pull to the consensus; 0: only the own bias is left
    mean_momentum: Annotated[float, Meta(gt=0, le=1)] = 0.1  # share of a batch in the running mean (paper: mu)

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        zeros = {name: torch.zeros(vit.width) for name in (OWN_BIAS, RUNNING, CONSENSUS)}
        return zeros | {AGREED: torch.zeros(1)}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("own_bias", Role.LOCAL, (OWN_BIAS,)),
            GroupRule("consensus", Role.GLOBAL, (CONSENSUS, AGREED)),
            # stays zero on the server, so that a device's change is its own mean
            GroupRule("running", Role.SHARED, (RUNNING,)),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        def body(vit: PatchViT) -> Forward:
            features = vit.features(vit.run_to_class(vit.embed(*images), 0))
            return Forward(vit.head(features + tensors[OWN_BIAS]), {FEATURES: features})

        forward: Forward = run_model(vit, tensors, body)
        return forward

    def generic_logits(self, vit: PatchViT, tensors: Named, images: Images) -> Tensor:
        return Method.forward(self, vit, tensors, images).logits

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        logits, collected = self.forward(vit, tensors, inputs.images)
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        # sums by class may leave a device, and so may their total
        by_class = one_hot(inputs.labels, logits).T @ (collected[FEATURES] * inputs.weight.unsqueeze(1))
        batch = by_class.sum(dim=0) / (inputs.weight.sum().clamp(min=1) * find_unit(vit.width))
        running = (1 - self.mean_momentum) * tensors[RUNNING] + self.mean_momentum * batch
        apart = (running - tensors[CONSENSUS]).square().sum()  # in units of sqrt(D)
        pull = 0.5 * self.kappa * tensors[AGREED].sum() * apart
        return Objective(loss + pull, {RUNNING: running}, shown=loss)

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        trained = {name: value for name, value in updated.items() if name != RUNNING}
        result = super().local_step(calculus, vit, phase, trained, {**fixed, **updated}, inputs)
        return result._replace(updated={**result.updated, RUNNING: result.collected[RUNNING]})

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanAndConsensus()


@dataclass(frozen=True, kw_only=True)
class MeanAndConsensus(WeightedMean):
    """Averages the shared model; the first mean of the features' means is the consensus from then on."""

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        steps = self.average(state, uploads, context)
        mean = steps.pop(RUNNING).astype("float32")
        updated, figures = move_tensors(state, steps)
        if not state.tensors[AGREED][0]:
            tensors = {**updated.tensors, CONSENSUS: mean, AGREED: state.tensors[AGREED] + 1}
            updated = replace(updated, tensors=tensors)
        return updated, figures
