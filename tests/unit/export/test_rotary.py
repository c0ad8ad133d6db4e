"""Graphs of models with rotary positions: exported, and verified against torch as they are."""

from pathlib import Path

import onnx
import pytest

from export.graphs import export_graphs
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.models.rotary import RotaryViT
from fedvit.program import Batch
from tests.support.rotary import ROTARY, make_rotary

BATCH = Batch(image_size=24, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole model", "split model"])
def test_graphs_of_rotary_models(kind: str, is_split: bool, graph_cache: Path) -> None:
    vit = RotaryViT("made here", make_rotary(kind))
    method = EFTViT(batch_size=4, local_blocks=1, mask=0.0) if is_split else FedAvg(batch_size=4)
    graphs = export_graphs(method, vit, BATCH, cache=graph_cache)
    assert {"train", "predict"} <= set(graphs)
    assert all(exported.max_difference < 1e-5 for exported in graphs.values())
    for exported in graphs.values():
        nodes = onnx.load_from_string(exported.content).graph.node
        assert {node.domain for node in nodes} == {""}
        assert not {"ScatterElements", "ScatterND", "Loop", "If"} & {node.op_type for node in nodes}
