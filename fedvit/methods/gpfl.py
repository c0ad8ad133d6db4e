"""GPFL: everybody's class embeddings guide the features, and a valve turns these into generic and personal ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from fedvit.methods.base import Gathered, GroupRule, Images, StepInputs, StepResult, cross_entropy
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.class_sums import find_features, one_hot
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.losses import TINY, normalise
from fedvit.methods.parts import HEAD
from fedvit.models.extra_head import ExtraHead
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

EMBEDDINGS = "class_embeddings.weight"
VALVE = ("valve_scale", "valve_shift")
CLASS_SHARES = "class_shares"


@dataclass(frozen=True, kw_only=True)
class GPFL(FedAvg):
    """The own head reads V(f, p), the embeddings read V(f, g): V(f, q) = relu((1 + s(q)) f + t(q)).

    s and t are relu layers with a norm. g is the mean of all class embeddings e_c of the round's start, and p their
    mean in the device's shares of the classes. A step minimises the head's cross-entropy, plus that of the cosines of
    V(f, g) with all e_c, plus lam |V(f, g) - e_y| by the embeddings of the start, plus mu / 2 |e, s, t|^2.
    Source: Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
    Federated Learning", ICCV 2023, arXiv:2308.10279, eq. 1 to 8. Differs from the paper: s and t learn from V(f, g)
    alone, because their gradient by V(f, p) would send the device's shares of the classes; lam's norm is a mean over
    images, and embeddings begin as a linear layer's rows do.
    """

    source: ClassVar[str] = "Zhang et al., ICCV 2023, arXiv:2308.10279"
    one_gradient: ClassVar[bool] = False
    why_one_class = "it compares features with those of each class"

    lam: Annotated[float, Meta(ge=0)] = 0.01  # strength of the pull to the embeddings of the start (paper: lambda)
    mu: Annotated[float, Meta(ge=0)] = 0.01  # decay of embeddings and valve

    def model_patches(self) -> tuple[ModelPatch, ...]:
        valve = (ExtraHead(name=name, widths=1) for name in VALVE)
        return (ExtraHead(name="class_embeddings", bias=False), *valve)

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        norms = {f"{name}_norm.weight": torch.ones(vit.width) for name in VALVE}
        norms |= {f"{name}_norm.bias": torch.zeros(vit.width) for name in VALVE}
        return norms | {CLASS_SHARES: torch.full((vit.classes,), 1 / vit.classes)}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("class_shares", Role.LOCAL, (CLASS_SHARES,)),
            GroupRule("head", Role.LOCAL, HEAD),
            GroupRule("embeddings", Role.SHARED, (EMBEDDINGS,)),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        features, first = find_features(vit, tensors, inputs.images), inputs.anchors[EMBEDDINGS]
        constants = {name: value.detach() for name, value in tensors.items() if name.startswith(VALVE)}
        counts = inputs.facts["class_counts"]
        logits = answer(tensors, turn_valve(constants, features, find_shares(counts).unsqueeze(0) @ first))
        generic = turn_valve(tensors, features, first.mean(dim=0, keepdim=True))
        cosines = normalise(generic) @ normalise(tensors[EMBEDDINGS]).T
        squares = generic.square().sum(dim=1, keepdim=True) + first.square().sum(dim=1) - 2 * generic @ first.T
        apart = (one_hot(inputs.labels, logits) * (squares.clamp(min=0) + TINY).sqrt()).sum(dim=1)
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        guide = inputs.mean(cross_entropy(cosines, inputs.labels) + self.lam * apart)
        decayed = [value.square().sum() for name, value in tensors.items() if name.startswith((EMBEDDINGS, *VALVE))]
        return Objective(loss + guide + 0.5 * self.mu * sum(decayed), {}, shown=loss)

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        trained = {name: value for name, value in updated.items() if name != CLASS_SHARES}
        result = super().local_step(calculus, vit, phase, trained, fixed, inputs)
        return result._replace(updated={**result.updated, CLASS_SHARES: find_shares(inputs.facts["class_counts"])})

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        features = find_features(vit, tensors, images)
        return answer(tensors, turn_valve(tensors, features, tensors[CLASS_SHARES].unsqueeze(0) @ tensors[EMBEDDINGS]))

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("class_shares", "head", "embeddings", "model"), anchors=("embeddings",)),)


def find_shares(counts: Tensor) -> Tensor:
    """Return (C,) the share of each class in the device's images."""
    return counts / counts.sum().clamp(min=1)


def turn_valve(tensors: Named, features: Tensor, condition: Tensor) -> Tensor:
    """Return (B, D) features as a condition (1, D) turns them."""

    def read(name: str) -> Tensor:
        weight, bias = (tensors[f"{name}_norm.{part}"] for part in ("weight", "bias"))
        hidden = (condition @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]).relu()
        return layer_norm(hidden, weight.shape, weight, bias)

    scale, shift = (read(name) for name in VALVE)
    return ((1 + scale) * features + shift).relu()


def answer(tensors: Named, features: Tensor) -> Tensor:
    """Return (B, C) the own head's logits."""
    return linear(features, tensors["head.weight"], tensors["head.bias"])
