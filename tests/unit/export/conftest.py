"""A method made for these tests, whose graphs have every input and output of the contract."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from export.graphs import Exported, export_graphs
from fedvit.methods.base import PREDICT, Forward, Gathered, GroupRule, Images, StepInputs, run_model
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Collect, Draw, Evaluate, Gather, Role, Train

CLASSES, WIDTH, CAPACITY = 3, 8, 5


@dataclass(frozen=True, kw_only=True)
class Everything(FedAvg):
    """FedAvg with a local bias, which an evaluation tunes; answers lean to what the device's own images look like."""

    source: ClassVar[str] = "made for these tests"

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return {"own.bias": torch.zeros(vit.classes)}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("own", Role.LOCAL, ("own.*",)), GroupRule("model", Role.SHARED, ("*",)))

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        def body(vit: PatchViT) -> tuple[Tensor, Tensor]:
            features = vit.features(vit.run_blocks(vit.embed(*images), 0, vit.depth))
            return vit.head(features), features

        logits, features = run_model(vit, tensors, body)
        return Forward(logits + tensors["own.bias"], {"looks": features})

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        plain = super().objective(vit, phase, tensors, inputs)
        share = inputs.facts["class_counts"] / inputs.facts["class_counts"].sum()
        loss = plain.loss + (tensors["own.bias"] - share).square().sum()
        if phase.anchors:
            loss = loss + (tensors["head.bias"] - inputs.anchors["head.bias"]).square().sum()
        if inputs.last is not None:
            loss = loss * (1 + inputs.last)
        if phase.draws:
            loss = loss * (1 + inputs.draws["picks"].to(loss.dtype).mean())
        return Objective(loss, plain.collected)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        assert gathered is not None
        logits, collected = self.forward(vit, tensors, images)
        near = torch.exp(-(collected["looks"][:, None] - gathered.values["looks"]).square().sum(dim=2))
        classes = torch.arange(vit.classes)
        votes = gathered.weight[:, None] * (gathered.labels[:, None] == classes).to(near.dtype)
        return logits + near @ votes

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        picks = Draw(name="picks", low=0, high=9, count=4, ascending=True)
        looks = Collect("looks", (vit.width,))
        return (self.phase(("model", "own"), anchors=("model",), repeats=2, draws=(picks,), collect=looks),)

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return Evaluate(
            graph=PREDICT,
            adapt=(self.phase(("own",), graph="tune"),),
            gather=Gather(graph="look", output="looks", shape=(vit.width,), capacity=CAPACITY),
        )


@dataclass(frozen=True)
class Made:
    """What `tiny` gives for a method of the table."""

    method: Everything
    vit: PatchViT
    batch: Batch
    graphs: dict[str, Exported]


@pytest.fixture(scope="session")
def everything(graph_cache: Path) -> Made:
    options = {"image_size": 16, "patch_size": 8, "width": WIDTH, "depth": 1, "heads": 1, "mlp_ratio": 1.0}
    vit = build_vit(SMALL, CLASSES, seed=0, options=options)
    method = Everything(batch_size=4, momentum=0.9)
    batch = Batch(image_size=16, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Made(method, vit, batch, export_graphs(method, vit, batch, cache=graph_cache))
