"""fvcore's count of an answer beside that of the graph which gives it."""

from pathlib import Path

import msgspec
import pytest

from coordinator.compute.planning.batch import method_batch
from export.graphs import export_unverified
from fedvit.methods import build_model, make_method
from profiles.cost import graph_cost
from profiles.crosscheck import fvcore_check
from tests.support.reports import cost
from tests.support.tiny import make_tiny


@pytest.mark.parametrize("name", ["eftvit", "fedavg", "fedperfix", "adapters"])
def test_products_are_those_of_the_graph(name: str, graph_cache: Path) -> None:
    """Matrix products agree to the last multiply-add, but for the last block's queries of 16 tokens; what fvcore counts
    beside them are norms."""
    made = make_tiny(make_method(name, {"batch_size": 8}), graph_cache)
    flops = graph_cost(made.graphs["predict"].content).flops // made.batch.answer_size
    check = fvcore_check(made.vit, msgspec.structs.replace(cost(0.75, 2), flops_evaluate=flops))
    assert check.ours_macs == flops // 2
    assert check.product_macs == check.ours_macs + 16 * made.vit.width**2
    assert check.macs > check.product_macs
    assert "softmax" in check.not_counted


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("transformer_small_text", {"context": 6, "width": 8, "heads": 2}),
        ("lstm_small_text", {"context": 6, "width": 8}),
        ("resnet_small_images", {"image_size": 8, "width": 4}),
    ],
)
def test_models_of_other_kinds_are_counted(model: str, options: dict[str, int]) -> None:
    method = make_method("fedavg")
    vit = build_model(method, model, 5, seed=0, options=options)
    batch = method_batch(method, vit)
    flops = graph_cost(export_unverified(method, vit, batch)["predict"]).flops // batch.answer_size
    check = fvcore_check(vit, msgspec.structs.replace(cost(0.75, 2), flops_evaluate=flops))
    assert check.product_macs == check.ours_macs == flops // 2
