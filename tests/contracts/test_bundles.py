"""Every method's predict graph becomes files that plain onnxruntime runs, for any number of images."""

import msgspec
import numpy as np
import onnx
import pytest
import torch

from coordinator.compute.planning.batch import method_batch
from export.bundle.assemble import LOGITS, PROBABILITIES, Precision, assemble, open_predict_graph
from export.bundle.measure import TOLERANCES, RunGraph, are_probabilities, open_session
from export.trace import to_onnx, trace
from fedvit.methods import build_model
from fedvit.methods.step import example_inputs, predict_step
from fedvit.models import SMALL
from fedvit.onnx_model import read_model
from tests.contracts.test_methods import CASES, TINY_MODEL, Case

SIDE = 35
"""The 16 patches of 8 leave 3 pixels at the right and bottom, as some models do; the graph sees patches alone."""


@pytest.fixture(scope="module")
def checked_traces() -> set[str]:
    """Traces of predict graphs whose files were compared: many methods share one."""
    return set()


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_bundle_answers_what_the_graph_answers(case: Case, checked_traces: set[str]) -> None:
    """Tensors and gathered values as they are verified with; one image, some, and more than the graph is made for."""
    method = case.method()
    vit = build_model(method, SMALL, 10, seed=0, options=TINY_MODEL)
    batch = msgspec.structs.replace(method_batch(method, vit), image_size=SIDE)
    inputs = example_inputs(method, vit, batch, None)
    traced = trace(predict_step(method, vit), inputs)
    if traced.key in checked_traces:
        return
    graph = to_onnx(traced)
    values = {name: value.numpy() for name, value in inputs.items()}
    images = torch.randn(batch.batch_size + 3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).numpy()
    want = RunGraph(graph, values, batch, 1)(images)
    voted = are_probabilities(want)
    assert voted == (method.evaluate(vit).gather is not None)  # the only methods so far whose answers are votes
    model = open_predict_graph(read_model(graph), batch, probabilities=voted)
    sizes = {}
    for precision in Precision:
        content = b"".join(assemble(model, values, precision, {}).parts)
        file = onnx.load_from_string(content)
        onnx.checker.check_model(file, full_check=True)
        read = {name for node in file.graph.node for name in node.input}
        assert {tensor.name for tensor in file.graph.initializer} <= read
        session = open_session(content, 1)
        for some in (images[:1], images[:3], images):
            logits, probabilities = session.run([LOGITS, PROBABILITIES], {"image": some})
            got, wanted = probabilities if voted else logits, want[: len(some)]
            assert np.abs(got - wanted).max() <= TOLERANCES[precision] * np.abs(want).max()
            np.testing.assert_allclose(softmax(logits), probabilities, rtol=1e-4, atol=1e-6)
        sizes[precision] = len(content)
    assert sizes[Precision.INT8] < sizes[Precision.FP16] < sizes[Precision.FP32]
    checked_traces.add(traced.key)


def softmax(logits_BC: np.ndarray) -> np.ndarray:
    raised = np.exp(logits_BC - logits_BC.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)
