"""FedPAC: a shared body whose features keep to everybody's class means, and for each device a mix of all heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from scipy.optimize import minimize
from torch import Tensor

from fedvit.methods.aggregators import Floats
from fedvit.methods.base import GroupRule, Method, RoundContext, ServerRule, ServerState, StepInputs, Upload
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.class_sums import KNOWN, PROTOTYPES, SUMS, MeansOfClasses, WithPrototypes, find_unit
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import cohort_weights
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Tensors

HEAD_GRAPH = "head"
"""The graph that trains the head alone."""
FIRST_HEAD, OWN_HEAD = "first_head", "own_head"
LEAST_SHARE = 1e-3
"""Smaller shares of a mix are left out."""


@dataclass(frozen=True, kw_only=True)
class FedPAC(WithPrototypes):
    """A device trains the head it got, then the body under that head, with features pulled to the prototypes.

    The server averages the body. The next head of a device is the mix of the cohort's heads that minimises the
    estimated error of its features: the mix's variance, plus the squared distance of its class means.
    Source: Xu, Tong and Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
    ICLR 2023, arXiv:2306.11867, algorithm 1; the estimate is that of its code. Differs from both: the statistics of
    features are those after the training, which the prototypes need as well; the distance to a prototype is divided
    by the width; a device outside of a cohort keeps its mix, and one that has not answered gets the first head.
    """

    source: ClassVar[str] = "Xu et al., ICLR 2023, arXiv:2306.11867"

    head_epochs: Annotated[int, Meta(ge=1)] = 1  # of the head alone, before those of the body

    def describe(self, features: Tensor) -> Tensor:
        return torch.cat([features, features.square().mean(dim=1, keepdim=True)], dim=1)

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        if phase.graph == HEAD_GRAPH:  # which no feature follows
            return Method.objective(self, vit, phase, tensors, inputs)
        return super().objective(vit, phase, tensors, inputs)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        # on a novel device nobody mixes heads any more
        head = Role.LOCAL if self.novel else Role.GENERATED
        return (
            GroupRule("prototypes", Role.GLOBAL, (PROTOTYPES, KNOWN)),
            GroupRule("sums", Role.SHARED, (SUMS,)),
            GroupRule("head", head, HEAD),
            GroupRule("body", Role.SHARED, ("*",)),
        )

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        head = self.phase(("head",), graph=HEAD_GRAPH, epochs=self.head_epochs)
        return (head, self.phase(("body",)), self.sum_phase())

    def server_rule(self, vit: PatchViT) -> ServerRule:
        tensors = vit.tensors()
        return MixedHeads(first={name: tensors[name] for name in ("head.weight", "head.bias")})


@dataclass(frozen=True, kw_only=True)
class MixedHeads(MeansOfClasses):
    """Makes the head of each device of a cohort from the heads of all."""

    first: Mapping[str, Tensor] = field(compare=False)

    why_no_regions = "its server compares the features of single devices"

    def begin(self, seed: int) -> Tensors:
        return {f"{FIRST_HEAD}/{name}": value.numpy() for name, value in self.first.items()}

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        first = {name: state.memory[f"{FIRST_HEAD}/{name}"] for name in self.first}
        return {name: state.memory.get(f"{OWN_HEAD}/{device}/{name}", value) for name, value in first.items()}

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        weights = cohort_weights(uploads, context.round)
        cohort = [upload for upload in uploads if weights[upload.device]]
        loaded = [upload.load() for upload in cohort]
        width = state.tensors[PROTOTYPES].shape[1]
        sums = np.stack([tensors[SUMS].astype(np.float64) * find_unit(width) for tensors in loaded])
        means = sums[:, :, :width].reshape(len(cohort), -1)
        variances = width * sums[:, :, width].sum(axis=1) - np.square(means).sum(axis=1)
        shares = mix_heads(means, variances / np.array([upload.samples for upload in cohort]))
        memory = dict(state.memory)
        for name in self.first:
            heads = np.stack(
                [
                    np.add(self.generate(state, upload.device, 0)[name], tensors[name], dtype=np.float64)
                    for upload, tensors in zip(cohort, loaded, strict=True)
                ]
            )
            for upload, mixed in zip(cohort, np.tensordot(shares, heads, axes=1), strict=True):
                memory[f"{OWN_HEAD}/{upload.device}/{name}"] = mixed.astype(np.float32)
        own = float(np.diag(shares).mean())
        return replace(updated, memory=memory), {**figures, "own_share_of_head": own}


def mix_heads(means: Floats, variances: Floats) -> Floats:
    """Return (N, N) the shares of all N heads in each device's, from class means (N, ...) and variances (N,).

    Row i minimises sum_j a_j^2 v_j + |sum_j a_j (m_i - m_j)|^2 over shares a that are not negative and sum to 1.
    """
    count = len(means)
    products = means @ means.T
    shares = np.empty((count, count))
    for own in range(count):
        # (m_i - m_j) (m_i - m_k)
        apart = products[own, own] - products[own][:, None] - products[own][None, :] + products
        form = np.diag(np.maximum(variances, 0)) + apart
        form /= max(np.trace(form), np.finfo(float).tiny)
        solved = minimize(
            lambda a, form=form: a @ form @ a,
            np.full(count, 1 / count),
            jac=lambda a, form=form: 2 * form @ a,
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 200},
        )
        row = np.where(solved.x > LEAST_SHARE, solved.x, 0)
        shares[own] = row / row.sum()
    return shares
