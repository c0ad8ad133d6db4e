"""MOON: features stay near those of the shared model, and leave those of the device's own last model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import GroupRule, RoundContext, ServerRule, ServerState, StepInputs, Upload
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.class_sums import find_features, read_features
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.losses import normalise, sample_losses
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Tensors

PREVIOUS = "previous."
LAST_MODEL = "last_model"


@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    """A device minimises its loss - mu log(e^a / (e^a + e^b)): a and b are the cosines, divided by tau, of its features
    with those of the round's first model and with those of the model that it sent last.

    The server keeps what each device sent last, and sends it. Before that it is the shared model, which pulls nothing.
    Source: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, arXiv:2103.16257, algorithm 1. Differs from
    the paper: features are what the head reads, without a projection head, and the last model is kept by the server.
    """

    source: ClassVar[str] = "Li et al., CVPR 2021, arXiv:2103.16257"
    why_no_patches = "it compares one feature of each image"

    mu: Annotated[float, Meta(ge=0)] = 1.0  # strength of the contrast; 0 is FedAvg
    tau: Annotated[float, Meta(gt=0)] = 0.5  # temperature of the cosines

    @property
    def reads_text(self) -> bool:
        return False

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return {f"{PREVIOUS}{name}": value for name, value in vit.tensors().items()}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("previous", Role.ASSIGNED, (f"{PREVIOUS}*",)), GroupRule("model", Role.SHARED, ("*",)))

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        previous = {name: tensors[f"{PREVIOUS}{name}"] for name in inputs.anchors}
        features, logits = read_features(vit, tensors, inputs.images)
        shared, last = (find_features(vit, of, inputs.images) for of in (inputs.anchors, previous))
        loss = inputs.mean(sample_losses(vit, logits, inputs.labels))
        contrast = contrast_features(features, shared, last, self.tau)
        return Objective(loss + self.mu * inputs.mean(contrast), {}, shown=loss)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",), anchors=("model",)),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanAndLastModels()


def contrast_features(own: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """(B,) -log of the softmax of `near` over the cosines with `own` of `near` and `far`; all are (B, D)."""
    own, near, far = map(normalise, (own, near, far))
    cosines = torch.stack([(own * near).sum(dim=1), (own * far).sum(dim=1)], dim=1)
    is_near = (torch.arange(2, device=own.device) == 0).to(own.dtype)
    return -(torch.log_softmax(cosines / tau, dim=1) * is_near).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class MeanAndLastModels(WeightedMean):
    """Keeps the model with which each device has ended its newest round."""

    why_no_regions = "its server keeps the model of each single device"

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        return {
            f"{PREVIOUS}{name}": state.memory.get(f"{LAST_MODEL}/{device}/{name}", value)
            for name, value in state.tensors.items()
        }

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        memory = dict(state.memory)
        for upload in uploads:
            deltas = upload.load()
            for name, value in state.tensors.items():
                memory[f"{LAST_MODEL}/{upload.device}/{name}"] = np.add(value, deltas[name]).astype(value.dtype)
        return replace(updated, memory=memory), figures
