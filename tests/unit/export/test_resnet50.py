"""The network of FedPerfix's table 3: its graphs, and what it costs at the paper's size."""

from pathlib import Path

import pytest
import torch

from coordinator.compute.planning.batch import UNCHANGED, choose_batch, method_batch
from export.graphs import export_graphs
from export.trace import to_onnx, trace
from fedvit.methods import build_model, make_method
from fedvit.methods.step import example_inputs, predict_step
from profiles.cost import graph_cost


@pytest.mark.slow
def test_graphs_on_small_images_are_torchs(tmp_path: Path) -> None:
    """The stem's large convolution, the pool behind it, bottlenecks and their shortcuts, on 32 pixels."""
    method = make_method("fedavg", {"batch_size": 2})
    vit = build_model(method, "resnet50", 10, seed=0, options={"image_size": 32})
    graphs = export_graphs(method, vit, method_batch(method, vit), cache=tmp_path)
    assert graphs.keys() == {"train", "update", "predict"}
    assert all(graph.max_difference < 1e-3 for graph in graphs.values())


def test_answer_costs_what_he_et_al_say() -> None:
    """3.8 billion multiply-adds in their table 1; 4.1 with the stride in the 3 x 3 convolution, as in torchvision.

    A step takes two images at a time: activations of three would be more than ACTIVATION_BYTES.
    """
    method = make_method("fedavg", {"batch_size": 64})
    with torch.device("meta"):
        vit = build_model(method, "resnet50", 1000, seed=0)
    batch = choose_batch(method, vit, UNCHANGED)
    assert batch.run_size == 2
    vit = build_model(method, "resnet50", 1000, seed=0)
    graph = to_onnx(trace(predict_step(method, vit), example_inputs(method, vit, batch, None)))
    assert graph_cost(graph).flops == 2 * batch.answer_size * 4_089_184_256
