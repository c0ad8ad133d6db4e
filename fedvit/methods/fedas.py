"""FedAS: the shared body first learns to see a device's images as its last one did, and devices weigh by Fisher."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.aggregators import Delta, Floats
from fedvit.methods.base import (
    GroupRule,
    Method,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
    cross_entropy,
)
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.class_sums import one_hot, read_features
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Tensors

OWN_PROTOTYPES, FISHER = "own_prototypes", "fisher"
ALIGN, MEASURE = "align", "measure"
"""Graphs: the body's alignment before the training, and the measurements after it."""
TOTAL, BY_CLASS = "total", "by_class"
MOST_OF_MEDIAN = 10
"""Largest weight of a device, in units of the median: a device claims its trace."""


@dataclass(frozen=True, kw_only=True)
class FedAS(Method):
    """The head stays on a device. A round begins with plain SGD on the new body: sum over the batch's classes c of the
    mean of |f(x) - C_c|^2 / D, for C_c the mean features of class c behind the device's last training.

    Then body and head are trained, and the trace of the Fisher information is measured: the sum over batches of
    |gradient|^2. The server's mean of the bodies has these traces as weights.
    Source: Yang, Huang and Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024, eq. 3 to
    9; the sums and the rate of the alignment are those of its code. Differs from both: C_c is found when the training
    ends, and a device has none in its first round; the server keeps them, because a device may not send a body that
    has learnt tensors which only it knows; only devices of the cohort are averaged, none
    with more than MOST_OF_MEDIAN times the median trace.
    """

    source: ClassVar[str] = "Yang et al., CVPR 2024"
    one_gradient: ClassVar[bool] = False
    why_one_class = "its prototypes are means of features by class"

    align_epochs: Annotated[int, Meta(ge=1)] = 1  # of the alignment
    align_lr: Annotated[float, Meta(gt=0)] = 0.01  # of the alignment, by plain SGD, no schedule

    @property
    def reads_text(self) -> bool:
        return False

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        # the last column is 1 for a class that the device has seen
        return {OWN_PROTOTYPES: torch.zeros(vit.classes, vit.width + 1), FISHER: torch.zeros(1)}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            # for a novel device nobody keeps them
            GroupRule("prototypes", Role.LOCAL if self.novel else Role.GENERATED, (OWN_PROTOTYPES,)),
            GroupRule("fisher", Role.SHARED, (FISHER,)),  # stays zero on the server: a device's change is its trace
            GroupRule("head", Role.LOCAL, HEAD),
            GroupRule("body", Role.SHARED, ("*",)),
        )

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        features, logits = read_features(vit, tensors, inputs.images)
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        weight = inputs.weight.unsqueeze(1)
        is_class = one_hot(inputs.labels, logits) * weight
        if phase.graph != ALIGN:
            by_class = {BY_CLASS: is_class.T @ torch.cat([features, weight], dim=1)} if phase.graph == MEASURE else {}
            return Objective(loss, by_class)
        # the last column of the prototypes is 1 for a class that the device has seen
        prototypes, flags = tensors[OWN_PROTOTYPES].split([vit.width, 1], dim=1)
        share = is_class @ (flags[:, 0] / is_class.sum(dim=0).clamp(min=1))  # 1 / images of its class in the batch
        apart = (features - is_class @ prototypes).square().mean(dim=1)
        return Objective((share * apart).sum(), {}, shown=loss)

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph == MEASURE:
            return self.measure(calculus, vit, phase, updated, fixed, inputs)
        if phase.graph != ALIGN:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        grads, value = calculus.gradients(lambda at: self.objective(vit, phase, {**fixed, **at}, inputs), updated)
        return StepResult(value.loss, {name: at - self.align_lr * grads[name] for name, at in updated.items()}, {})

    def measure(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        """Add a batch to the features by class and to the trace."""
        model = {name: value for name, value in fixed.items() if name not in (OWN_PROTOTYPES, FISHER)}
        grads, value = calculus.gradients(lambda at: self.objective(vit, phase, at, inputs), model)
        trace = torch.stack([grad.square().sum() for grad in grads.values()]).sum().reshape(1)
        added = {FISHER: trace, OWN_PROTOTYPES: value.collected[BY_CLASS]}
        # a novel device has no trace to send
        totals = {
            name: calculus.inputs[f"slot/{TOTAL}/{name}"] + batch for name, batch in added.items() if name in updated
        }
        calculus.slots |= {f"{TOTAL}/{name}": total for name, total in totals.items()}
        sums = totals[OWN_PROTOTYPES]
        means = sums / sums[:, -1:].clamp(min=1)  # the last column becomes 1, or stays 0
        return StepResult(value.loss, {**totals, OWN_PROTOTYPES: means}, {})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        align = self.phase(("body",), graph=ALIGN, epochs=self.align_epochs, lr=self.align_lr, slots=())
        measure = self.phase(("prototypes", "fisher"), graph=MEASURE, epochs=1, slots=(TOTAL,))
        return (align, self.phase(("head", "body")), measure)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return FisherMean(shape=(vit.classes, vit.width + 1))


@dataclass(frozen=True, kw_only=True)
class FisherMean(WeightedMean):
    """A mean in which a device weighs as much as the trace that it has measured; all the same where none is above 0.

    Keeps each device's prototypes.
    """

    shape: tuple[int, int]

    why_never_late = "its server compares the Fisher information of one round's devices"
    why_no_regions = "its server weighs each single device"
    why_not_measured = "an upload has the Fisher trace and class means beside the update"
    averages = False

    def weigh(self, uploads: Sequence[Upload], round_number: int) -> list[Delta]:
        deltas = super().weigh(uploads, round_number)
        claimed = np.array([max(0.0, float(delta.load()[FISHER][0])) for delta in deltas])
        most = MOST_OF_MEDIAN * np.median(claimed[claimed > 0]) if claimed.any() else 0.0
        traces = np.minimum(claimed, most).tolist()
        total = sum(traces)
        return [
            delta._replace(weight=trace / total if total else 1 / len(traces))
            for delta, trace in zip(deltas, traces, strict=True)
        ]

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        kept = state.memory.get(f"{OWN_PROTOTYPES}/{device}")
        return {OWN_PROTOTYPES: np.zeros(self.shape, np.float32) if kept is None else kept}

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        memory = dict(state.memory)
        for upload in uploads:
            before = self.generate(state, upload.device, 0)[OWN_PROTOTYPES]
            memory[f"{OWN_PROTOTYPES}/{upload.device}"] = np.add(before, upload.load()[OWN_PROTOTYPES])
        return replace(updated, memory=memory), figures

    def average(self, state: ServerState, uploads: Sequence[Upload], context: RoundContext) -> dict[str, Floats]:
        steps = super().average(state, uploads, context)
        return {name: step for name, step in steps.items() if name != FISHER}
