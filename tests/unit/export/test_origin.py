"""A graph that was made before is found without a trace; whatever tracing could look at is in its key."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import nn

from export.graphs import export_graphs
from export.origin import origin_of
from fedvit.methods import METHODS, build_model, make_method
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.fedprox import FedProx
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Batch

MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 1.0}
BATCH = Batch(image_size=16, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3)
METHOD = FedAvg(batch_size=4)


def model(*, seed: int = 0, **options: Any) -> PatchViT:
    return build_model(METHOD, SMALL, 3, seed=seed, options={**MODEL, **options})


def key(vit: PatchViT | None = None, method: FedAvg = METHOD, batch: Batch = BATCH, graph: str = "train") -> str:
    found = origin_of(method, vit or model(), batch, graph)
    assert found is not None
    return found


def test_weights_are_inputs_and_epochs_are_not_in_a_graph() -> None:
    assert key() == key(model(seed=1)) == key(method=replace(METHOD, epochs=5))


CHANGES: dict[str, Callable[[], str]] = {
    "the graph": lambda: key(graph="predict"),
    "an option of the method": lambda: key(method=replace(METHOD, momentum=0.9)),
    "the method": lambda: key(method=FedProx(batch_size=4)),
    "the batch": lambda: key(batch=msgspec.structs.replace(BATCH, micro_batch=2)),
    "a size of the model": lambda: key(model(depth=1)),
    "what no tensor shows": lambda: key(model(heads=1)),  # the same tensors, another attention
    "another precision": lambda: key(model().double()),
    "a number of a module": lambda: key(_with(lambda vit: setattr(vit.norm, "eps", 1e-3))),
    "a buffer": lambda: key(_with(lambda vit: vit.register_buffer("scale", torch.tensor(2.0)))),
    "another buffer": lambda: key(_with(lambda vit: vit.register_buffer("scale", torch.tensor(3.0)))),
    "a part of the model": lambda: key(_with(lambda vit: setattr(vit, "norm", nn.Identity()))),
    "the kind of a part": lambda: key(_with(lambda vit: setattr(vit.blocks[0].mlp, "act", nn.ReLU()))),
}


def _with(change: Callable[[Any], Any]) -> PatchViT:
    vit = model()
    change(vit.vit)
    return vit


def test_every_change_makes_another_key() -> None:
    keys = {what: make() for what, make in CHANGES.items()} | {"nothing": key()}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("attribute", [lambda x: x, object()], ids=["a function made here", "any object"])
def test_what_is_not_understood_has_no_key(attribute: object) -> None:
    vit = _with(lambda vit: setattr(vit, "made_here", attribute))
    assert origin_of(METHOD, vit, BATCH, "train") is None


@dataclass(frozen=True, kw_only=True)
class Foreign(FedAvg):
    """Its module may call code of which nothing would be in a key."""

    source: ClassVar[str] = "made for these tests"


def test_a_method_of_another_package_has_no_key() -> None:
    assert origin_of(Foreign(batch_size=4), model(), BATCH, "train") is None


@pytest.mark.parametrize("name", METHODS)
def test_graphs_of_every_method_have_a_key(name: str) -> None:
    method = make_method(name, {"batch_size": 4})
    vit = build_model(method, SMALL, 3, seed=0, options={**MODEL, "depth": 3})
    assert origin_of(method, vit, BATCH, "train")


def test_what_was_seen_is_not_traced_again(tmp_path: Path) -> None:
    """Nor lost, when the graph itself is."""
    first = export_graphs(METHOD, model(), BATCH, cache=tmp_path)
    said: list[str] = []
    again = export_graphs(METHOD, model(seed=1), BATCH, cache=tmp_path, progress=said.append)
    assert said == []
    assert {name: made.content for name, made in again.items()} == {name: made.content for name, made in first.items()}
    for file in tmp_path.rglob("*.onnx"):
        file.unlink()
    anew = export_graphs(METHOD, model(), BATCH, cache=tmp_path, progress=said.append)
    assert [line for line in said if line.startswith("tracing")]
    assert {name: made.content for name, made in anew.items()} == {name: made.content for name, made in first.items()}
