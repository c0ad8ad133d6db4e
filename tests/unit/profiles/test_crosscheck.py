"""fvcore's count of an answer beside that of the graph which gives it."""

from pathlib import Path

import msgspec
import pytest

from fedvit.methods import make_method
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
