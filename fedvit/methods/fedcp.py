"""FedCP: a policy splits each image's features between the device's own head and everybody's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import layer_norm

from fedvit.methods.base import (
    Forward,
    GroupRule,
    Images,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    Upload,
    cross_entropy,
    run_model,
)
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.class_sums import find_features, one_hot
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights
from fedvit.models.extra_head import ExtraHead
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Tensors

OWN_HEAD, POLICY, POLICY_NORM = "own_head", "policy", "policy_norm"
FEATURES = "features"
BANDWIDTHS = (10, 15, 20, 50)
"""Widths of the kernels by which the released code compares features."""
OWN_HEADS = "own_heads"


@dataclass(frozen=True, kw_only=True)
class FedCP(FedAvg):
    """The answer is h_own(r f(x)) + h((1 - r) f(x)): r, for each number of the features, is the policy's.

    (a, b) = relu(norm(P(f(x) v))), r = softmax of a over (a, b). v is the unit vector of the sum over classes of the
    own head's rows at the round's start. A device trains body, policy and own head with the loss + lam MMD between its
    features and those of the round's first body. The shared head h becomes the mean of (h + h_own) / 2.
    Source: Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional
    Policy", KDD 2023, arXiv:2307.01217, algorithm 1; the halves of the heads are those of its code. Differs from both:
    r without Gumbel's noise; the MMD, with its Gaussian kernels, is that of the batch's two means, because single
    images may not be compared with each other in what a device sends; the server keeps the own heads, which it can
    find from what the paper sends.
    """

    source: ClassVar[str] = "Zhang et al., KDD 2023, arXiv:2307.01217"
    one_gradient: ClassVar[bool] = False
    why_one_class = "its condition follows from sums of features by class"

    lam: Annotated[float, Meta(ge=0)] = 1.0  # strength of the pull to the first body's features (paper: lambda)

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (ExtraHead(name=OWN_HEAD, init="head"), ExtraHead(name=POLICY, widths=2))

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return {f"{POLICY_NORM}.weight": torch.ones(2 * vit.width), f"{POLICY_NORM}.bias": torch.zeros(2 * vit.width)}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            # for a novel device nobody keeps its head
            GroupRule("own_head", Role.LOCAL if self.novel else Role.GENERATED, (f"{OWN_HEAD}.*",)),
            GroupRule("shared_head", Role.GLOBAL, HEAD),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def split(self, vit: PatchViT, tensors: Named, images: Images, rows: Tensor) -> Forward:
        """Return the answers of both heads together; `rows` are the own head's of which v is the sum."""

        def body(vit: PatchViT) -> Forward:
            features = vit.features(vit.run_to_class(vit.embed(*images), 0))
            total = rows.sum(dim=0)
            unit = total / total.square().sum().sqrt().clamp(min=1e-12)
            weight, bias = (tensors[f"{POLICY_NORM}.{part}"] for part in ("weight", "bias"))
            pairs = layer_norm(vit.head(features * unit, POLICY), weight.shape, weight, bias).relu()
            own, shared = pairs.reshape(len(pairs), 2, vit.width).unbind(dim=1)
            share = torch.sigmoid(own - shared)  # a softmax of two
            logits = vit.head(share * features, OWN_HEAD) + vit.head((1 - share) * features)
            return Forward(logits, {FEATURES: features})

        forward: Forward = run_model(vit, tensors, body)
        return forward

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        return self.split(vit, tensors, images, tensors[f"{OWN_HEAD}.weight"])

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        logits, collected = self.split(vit, tensors, inputs.images, inputs.anchors[f"{OWN_HEAD}.weight"])
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        first = find_features(vit, {**tensors, **inputs.anchors}, inputs.images)
        # sums by class may leave a device, and so may their total
        by_class = one_hot(inputs.labels, logits).T @ ((collected[FEATURES] - first) * inputs.weight.unsqueeze(1))
        apart = (by_class.sum(dim=0) / inputs.weight.sum().clamp(min=1)).square().sum()
        discrepancy = sum(2 - 2 * torch.exp(-apart / (2 * a)) for a in BANDWIDTHS)
        return Objective(loss + self.lam * discrepancy, {}, shown=loss)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("own_head", "model"), anchors=("own_head", "model")),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanAndOwnHeads()


@dataclass(frozen=True, kw_only=True)
class MeanAndOwnHeads(WeightedMean):
    """Averages the model, keeps each device's own head, and moves the shared head half of the way to their mean."""

    why_never_late = "its server keeps the head with which a device ended the newest round"
    why_no_regions = "its server keeps the head of each single device"
    averages = False

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        return {
            f"{OWN_HEAD}.{part}": state.memory.get(f"{OWN_HEADS}/{device}/{part}", state.tensors[f"head.{part}"])
            for part in ("weight", "bias")
        }

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        weights, memory = cohort_weights(uploads, context.round), dict(state.memory)
        heads = {
            f"head.{part}": np.multiply(state.tensors[f"head.{part}"], 0.5, dtype=np.float64)
            for part in ("weight", "bias")
        }
        for upload in uploads:
            deltas = upload.load()
            for name, before in self.generate(state, upload.device, 0).items():
                own, part = np.add(before, deltas[name], dtype=np.float64), name.removeprefix(f"{OWN_HEAD}.")
                heads[f"head.{part}"] = heads[f"head.{part}"] + weights[upload.device] * own / 2
                memory[f"{OWN_HEADS}/{upload.device}/{part}"] = own.astype(np.float32)
        tensors = {**updated.tensors, **{name: value.astype(np.float32) for name, value in heads.items()}}
        return replace(updated, tensors=tensors, memory=memory), figures
