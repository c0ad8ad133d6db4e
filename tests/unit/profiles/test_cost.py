"""What a graph costs, counted on the graph, against torch's own counter and against the closed forms of a ViT."""

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from torch.utils.flop_counter import FlopCounterMode

from export.verify import reference_step
from fedvit.methods.step import example_inputs, predict_step
from profiles.cost import graph_cost

# the tiny model of tests/conftest.py: samples, patches and values of each, width, blocks, classes
B, P, V, D, L, C = 8, 16, 192, 32, 3, 10


def linear(tokens: int) -> int:
    """MACs of a block's four linear layers with an MLP of 4 D: 3 n D^2 + n D^2 + 8 n D^2."""
    return 12 * tokens * D**2


def attention(tokens: int) -> int:
    """MACs of a block's two products, Q K^T and A V: n^2 D each."""
    return 2 * tokens**2 * D


def last_linear(tokens: int) -> int:
    """Of the last block, which is asked for the class token alone: keys and values of all, 2 n D^2, and a query, a
    projection and an MLP of one token, D^2 + D^2 + 8 D^2."""
    return (2 * tokens + 10) * D**2


def last_attention(tokens: int) -> int:
    """Of one query: n D each."""
    return 2 * tokens * D


# --- whole graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eftvit", "fedavg"])
def test_prediction_costs_what_the_closed_form_says(name: str, tiny: Any) -> None:
    """c(n) = 12 n D^2 + 2 n^2 D for each of 2 blocks on 17 tokens, (2 n + 10) D^2 + 2 n D for the last, P V D for the
    embedding, D C for the head, each twice (multiply, add) for each of 8 samples:
    2 * 8 * (2 * (208 896 + 18 496) + 45 056 + 1 088 + 98 304 + 320) = 9 592 832."""
    macs = (L - 1) * (linear(1 + P) + attention(1 + P)) + last_linear(1 + P) + last_attention(1 + P) + P * V * D + D * C
    assert 2 * B * macs == 9_592_832
    assert graph_cost(tiny(name).graphs["predict"].content).flops == 9_592_832


def test_a_step_of_fedavg_costs_three_times_the_forward_pass(tiny: Any) -> None:
    """Each linear layer once forward, once for its input's and once for its weights' gradient; each product of two
    activations likewise. Only the images need no gradient, so the embedding counts twice."""
    blocks = (L - 1) * (linear(1 + P) + attention(1 + P)) + last_linear(1 + P) + last_attention(1 + P)
    macs = 3 * blocks + 2 * P * V * D + 3 * D * C
    assert graph_cost(tiny("fedavg").graphs["train"].content).flops == 2 * B * macs


def test_a_step_of_eftvit_costs_what_the_closed_form_says(tiny: Any) -> None:
    """On 1 + 4 tokens: each block's linear layers twice, for values and their gradients, M = 2 times more for the local
    blocks' weights, and all products of activations three times. The last block is not local. The embedding is trained
    (2), and its positions' gradient is one product of the 16 patches with the 8 * 4 tokens."""
    kept, local = 4, 2
    macs = (2 * (L - 1) + local) * linear(1 + kept) + 3 * (L - 1) * attention(1 + kept)
    macs += 2 * last_linear(1 + kept) + 3 * last_attention(1 + kept) + 2 * kept * V * D + 3 * D * C
    assert graph_cost(tiny("eftvit").graphs["train"].content).flops == 2 * (B * macs + P * B * kept * D)


@pytest.mark.parametrize("name", ["eftvit", "fedavg"])
def test_counts_equal_torchs_counter(name: str, tiny: Any) -> None:
    """The same step, run eagerly with backward() under FlopCounterMode: nothing was lost or added on the way."""
    method, vit, batch, graphs = tiny(name)
    (phase,) = method.phases(vit)
    inputs = example_inputs(method, vit, batch, phase)
    with FlopCounterMode(display=False) as counter:
        reference_step(method, vit, phase)(inputs)
    assert graph_cost(graphs["train"].content).flops == counter.get_total_flops()
    inputs = example_inputs(method, vit, batch, None)
    with FlopCounterMode(display=False) as counter:
        predict_step(method, vit)(inputs)
    assert graph_cost(graphs["predict"].content).flops == counter.get_total_flops()


# --- single products ----------------------------------------------------------------------------------


def product(op: str, left: Any, right: Any, out: Any, **attributes: Any) -> bytes:
    """A graph of one product; a shape of None is not known."""
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"], name="the product", **attributes)],
        "one product",
        [
            helper.make_tensor_value_info("a", TensorProto.FLOAT, left),
            helper.make_tensor_value_info("b", TensorProto.FLOAT, right),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)],
    )
    content: bytes = helper.make_model(graph).SerializeToString()
    return content


@pytest.mark.parametrize(
    ("graph", "macs"),
    [
        (product("MatMul", [3, 5], [5, 7], [3, 7]), 3 * 5 * 7),
        (product("MatMul", [2, 4, 3, 5], [2, 4, 5, 7], [2, 4, 3, 7]), 2 * 4 * 3 * 5 * 7),
        (product("MatMul", [2, 3, 5], [5, 7], [2, 3, 7]), 2 * 3 * 5 * 7),
        (product("Gemm", [3, 5], [5, 7], [3, 7]), 3 * 5 * 7),
        (product("Gemm", [5, 3], [5, 7], [3, 7], transA=1), 3 * 5 * 7),
        (product("Gemm", [3, 5], [7, 5], [3, 7], transB=1), 3 * 5 * 7),
        (product("Gemm", [5, 3], [7, 5], [3, 7], transA=1, transB=1), 3 * 5 * 7),
        (product("Add", [3, 5], [3, 5], [3, 5]), 0),
    ],
)
def test_a_product(graph: bytes, macs: int) -> None:
    """(3, 5) times (5, 7) takes 105 multiplications and additions: 210 FLOPs; elementwise work counts nothing."""
    assert graph_cost(graph).flops == 2 * macs


@pytest.mark.parametrize("shapes", [(None, [5, 7], [3, 7]), ([3, 5], [5, 7], None), ([3, "n"], ["n", 7], [3, 7])])
def test_a_shape_that_is_not_known_is_refused(shapes: Any) -> None:
    """Counting it as nothing would let a large step pass for a small one."""
    with pytest.raises(ValueError, match="MatMul node 'the product' has an operand of unknown shape"):
        graph_cost(product("MatMul", *shapes))


def test_the_graphs_name_every_shape(tiny: Any) -> None:
    """The exporter's own shape annotations are dropped on export; those that are there now came from inference."""
    for name in ("eftvit", "fedavg"):
        for exported in tiny(name).graphs.values():
            model = onnx.load_from_string(exported.content)
            known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
            assert {output for node in model.graph.node for output in node.output} <= known
