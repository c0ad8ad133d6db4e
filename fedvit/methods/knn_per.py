"""kNN-Per: the averaged model's answer, mixed with the vote of the device's own nearest training images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import PREDICT, Forward, Gathered, Images, run_model
from fedvit.methods.calculus import Named
from fedvit.methods.fedavg import FedAvg
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Gather

FEATURES = "features"

FAR = 1e30
"""Squared distance of an empty row; larger than that of any image."""


@dataclass(frozen=True, kw_only=True)
class KnnPer(FedAvg):
    """Trains as FedAvg does; at evaluation a device remembers its own training images.

    Source: Marfoq et al., "Personalized Federated Learning through Local Memorization", arXiv:2111.09360.
    Differs from the paper: `knn_weight` is the same on all devices instead of tuned on each one's validation
    images, and a device stores up to `capacity` images, chosen at random where it has more. Features are the class
    token before the final norm, as FedTP's code has them.
    """

    source: ClassVar[str] = "Marfoq et al., arXiv:2111.09360"
    why_one_class = "neighbours vote for one class each"

    knn_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5  # of the neighbours' vote (paper: lambda); 0 is FedAvg
    neighbours: Annotated[int, Meta(ge=1)] = 10  # (paper: k)
    capacity: Annotated[int, Meta(ge=1)] = 1000  # training images that a device remembers
    scale: Annotated[float, Meta(gt=0)] = 1.0  # squared distances are divided by width times this

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        return with_features(vit, tensors, images)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        assert gathered is not None  # `evaluate` asks for it
        forward = self.forward(vit, tensors, images)
        return mixture(forward, gathered, weight=self.knn_weight, neighbours=self.neighbours, scale=self.scale)

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return remembering(vit, self.capacity)


def with_features(vit: PatchViT, tensors: Named, images: Images) -> Forward:
    """Logits, and the class token before the final norm, which is what a device remembers."""

    def body(vit: PatchViT) -> Forward:
        x_BND = vit.run_to_class(vit.embed(*images), 0)
        return Forward(vit.classify(x_BND), {FEATURES: vit.features(x_BND, normed=False)})

    forward: Forward = run_model(vit, tensors, body)
    return forward


def remembering(vit: PatchViT, capacity: int) -> Evaluate:
    """An evaluation whose predict graph gets the features of up to `capacity` training images."""
    return Evaluate(
        graph=PREDICT, gather=Gather(graph=FEATURES, output=FEATURES, shape=(vit.width,), capacity=capacity)
    )


def mixture(forward: Forward, gathered: Gathered, *, weight: float, neighbours: int, scale: float) -> Tensor:
    """Probabilities (B, C): weight * vote + (1 - weight) * softmax(logits).

    Each of the k nearest stored features votes for its class with exp(-d2 / (D scale)), d2 the squared distance and
    D the width; votes sum to 1. Letters: B samples, S stored, K neighbours, C classes.
    """
    features_BD, stored_SD = forward.collected[FEATURES], gathered.values[FEATURES]
    products_BS = features_BD @ stored_SD.T
    squares_BS = features_BD.square().sum(dim=1, keepdim=True) + stored_SD.square().sum(dim=1)
    d2_BS = (squares_BS - 2 * products_BS).clamp(min=0) + (1 - gathered.weight) * FAR
    nearest = torch.topk(-d2_BS, min(neighbours, d2_BS.shape[1]), dim=1)
    # a softmax is what exp(...) / sum of them is, and does not underflow where all are far
    vote_BK = torch.softmax(nearest.values / (features_BD.shape[1] * scale), dim=1) * gathered.weight[nearest.indices]
    classes = torch.arange(forward.logits.shape[1], device=features_BD.device)
    chosen_BKC = (gathered.labels[nearest.indices][..., None] == classes).to(vote_BK.dtype)
    vote_BC = (vote_BK[..., None] * chosen_BKC).sum(dim=1)
    trust = weight * gathered.weight.sum().clamp(max=1)  # where nothing is stored, nobody votes
    return trust * vote_BC + (1 - trust) * torch.softmax(forward.logits, dim=1)
