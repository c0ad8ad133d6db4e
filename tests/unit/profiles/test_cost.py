"""What a graph costs, counted on the graph, against torch's own counter and against the closed forms of a ViT."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from torch.utils.flop_counter import FlopCounterMode

from coordinator.compute.planning.batch import method_batch
from export.graphs import export_unverified
from export.verify import reference_step
from fedvit.methods import make_method
from fedvit.methods.step import example_inputs, predict_step
from fedvit.resources import ProductKind
from profiles.cost import GraphCost, Product, block_of, flop_shares, graph_cost

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
        (product("Conv", [2, 3, 8, 8], [5, 3, 3, 3], [2, 5, 6, 6]), 2 * 5 * 36 * 27),
        (product("Conv", [3, 2, 8, 8], [5, 2, 6, 6], [3, 5, 3, 3], dilations=[1, 1]), 2 * 5 * 36 * 27),
        (product("ConvTranspose", [2, 5, 6, 6], [5, 3, 3, 3], [2, 3, 8, 8]), 2 * 5 * 36 * 27),
        (product("Add", [3, 5], [3, 5], [3, 5]), 0),
    ],
)
def test_a_product(graph: bytes, macs: int) -> None:
    """(3, 5) times (5, 7) takes 105 multiplications and additions: 210 FLOPs; elementwise work counts nothing. A
    convolution and its two gradients take the same."""
    assert graph_cost(graph).flops == 2 * macs


def test_products_of_unknown_shape_are_refused() -> None:
    with pytest.raises(ValueError):
        graph_cost(product("Conv", [2, 3, 8, 8], None, [2, 5, 6, 6]))
    with pytest.raises(ValueError):
        graph_cost(product("Gemm", [5, 3], [5, 7], None, transA=1))


@pytest.mark.parametrize("shapes", [(None, [5, 7], [3, 7]), ([3, 5], [5, 7], None), ([3, "n"], ["n", 7], [3, 7])])
def test_a_shape_that_is_not_known_is_refused(shapes: Any) -> None:
    """Counting it as nothing would let a large step pass for a small one."""
    with pytest.raises(ValueError):
        graph_cost(product("MatMul", *shapes))


def test_the_graphs_name_every_shape(tiny: Any) -> None:
    """The exporter's own shape annotations are dropped on export; those that are there now came from inference."""
    for name in ("eftvit", "fedavg"):
        for exported in tiny(name).graphs.values():
            model = onnx.load_from_string(exported.content)
            known = {value.name for value in (*model.graph.value_info, *model.graph.output)}
            assert {output for node in model.graph.node for output in node.output} <= known


# --- graphs made by hand ------------------------------------------------------------------------------

Values = dict[str, tuple[int, ...]]
OTHER_TYPES = {"half": TensorProto.FLOAT16, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8}


def node(op: str, inputs: str, output: str, name: str = "", **attributes: Any) -> onnx.NodeProto:
    """`inputs` are names with spaces between them; so are outputs."""
    return helper.make_node(op, inputs.split(), output.split(), name=name, **attributes)


def by_hand(nodes: Sequence[onnx.NodeProto], inputs: Values, outputs: Values, between: Values | None = None) -> bytes:
    """A graph whose values have these shapes; float32, unless the name begins with another type's."""

    def describe(values: Values) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, OTHER_TYPES.get(name.split("_")[0], TensorProto.FLOAT), shape)
            for name, shape in values.items()
        ]

    graph = helper.make_graph(
        list(nodes), "by hand", describe(inputs), describe(outputs), value_info=describe(between or {})
    )
    content: bytes = helper.make_model(graph).SerializeToString()
    return content


def find_updated(cost: GraphCost) -> list[int]:
    return [each.moved_bytes for each in cost.nodes]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (product("MatMul", [3, 5], [5, 7], [3, 7]), Product("weights", 1, 3, 5, 7)),
        (product("MatMul", [2, 3, 5], [5, 7], [2, 3, 7]), Product("weights", 1, 6, 5, 7)),
        (product("MatMul", [2, 4, 3, 5], [2, 4, 5, 7], [2, 4, 3, 7]), Product("attention", 8, 3, 5, 7)),
        (product("Gemm", [3, 5], [7, 5], [3, 7], transB=1), Product("weights", 1, 3, 5, 7)),
        (product("Gemm", [5, 3], [5, 7], [3, 7], transA=1), Product("gradient", 1, 3, 5, 7)),
        (product("Gemm", [3, 5], [5, 7], [3, 7], transA=0), Product("weights", 1, 3, 5, 7)),
        (
            product("MatMulIntegerToFloat", [3, 5], [5, 7], [3, 7], domain="com.microsoft"),
            Product("integers", 1, 3, 5, 7),
        ),
    ],
)
def test_the_kind_of_a_product(graph: bytes, expected: Product) -> None:
    """With weights all rows are one matrix; with another activation there is a product of each pair of matrices."""
    [only] = graph_cost(graph).nodes
    assert only.product == expected


def test_a_product_of_integers_counts_as_one_of_floats() -> None:
    assert Product("weights", 2, 3, 5, 7).flops == Product("integers", 2, 3, 5, 7).flops == 2 * 2 * 3 * 5 * 7


def test_bytes_are_those_read_and_written() -> None:
    """Of their own types: 6 + 3 + 6 floats; 4 halves and 4 floats; 4 integers of one byte, one scale and 4 floats."""
    cost = graph_cost(
        by_hand(
            [
                node("Add", "x b", "y"),
                node("Cast", "half_h", "z", to=TensorProto.FLOAT),
                node("DequantizeLinear", "int8_q s", "w"),
            ],
            {"x": (2, 3), "b": (3,), "half_h": (4,), "int8_q": (4,), "s": ()},
            {"y": (2, 3), "z": (4,), "w": (4,)},
        )
    )
    assert find_updated(cost) == [4 * (6 + 3 + 6), 4 * 2 + 4 * 4, 4 + 4 + 4 * 4]
    assert cost.flops == 0


def test_views_move_nothing() -> None:
    names = ["Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"]
    nodes = [node(op, "x", f"y{number}") for number, op in enumerate(names)]
    outputs: Values = {f"y{number}": (6,) for number in range(len(names))}
    assert find_updated(graph_cost(by_hand(nodes, {"x": (2, 3)}, outputs))) == [0] * len(names)


@pytest.mark.parametrize(
    ("order", "readers", "free"),
    [
        ([0, 2, 1], ["MatMul"], True),
        ([0, 2, 1], ["MatMul", "MatMul"], True),
        ([0, 2, 1], ["MatMul", "Exp"], False),  # somebody else wants it, too
        ([1, 0, 2], ["MatMul"], False),  # no product has a flag for that
        ([0, 2, 1], ["Exp"], False),
    ],
)
def test_a_transposition_that_is_a_products_flag_moves_nothing(
    order: list[int], readers: list[str], free: bool
) -> None:
    """Other nodes, which like it have no name, move what they move."""
    nodes = [node("Transpose", "x", "t", perm=order)]
    nodes += [node(op, "t x" if op == "MatMul" else "t", f"y{number}") for number, op in enumerate(readers)]
    outputs: Values = {f"y{number}": (4, 4, 4) for number in range(len(readers))}
    cost = graph_cost(by_hand(nodes, {"x": (4, 4, 4)}, outputs, {"t": (4, 4, 4)}))
    assert cost.nodes[0].moved_bytes == (0 if free else 2 * 4**4)
    assert [each.moved_bytes for each in cost.nodes[1:]] == [2 * 4**4 * (op != "MatMul") for op in readers]


def test_two_of_the_axes_are_no_flag_of_a_plain_product() -> None:
    graph = by_hand(
        [node("Transpose", "x", "t", perm=[1, 0]), node("MatMul", "t x", "y")],
        {"x": (4, 4)},
        {"y": (4, 4)},
        {"t": (4, 4)},
    )
    assert graph_cost(graph).nodes[0].moved_bytes == 2 * 4 * 16


def test_cost_has_the_size_of_the_file(tiny: Any) -> None:
    content = tiny("fedavg").graphs["predict"].content
    assert graph_cost(content).graph_bytes == len(content)


# --- kernels ------------------------------------------------------------------------------------------


def test_kernels_compute_weights_of_attention_again_and_move_less(tiny: Any) -> None:
    """The gradient of attention needs Q K^T once more: n^2 D MACs for each sample, in each block but the last."""
    cost = graph_cost(tiny("fedavg").graphs["train"].content)
    own = cost.with_kernels
    assert own
    assert own.flops == cost.flops + 2 * B * (L - 1) * (1 + P) ** 2 * D
    assert own.graph_bytes == cost.graph_bytes
    assert own.activation_bytes < cost.activation_bytes
    assert sum(own.work.moved_bytes.values()) < 0.8 * sum(cost.work.moved_bytes.values())
    assert len(own.nodes) < len(cost.nodes)
    weights = 2 * 4 * B * 2 * (1 + P) ** 2  # of two heads, read and written
    assert Counter(node.moved_bytes for node in own.nodes if node.op == "Softmax")[weights] == 2 * (L - 1)


def test_a_graph_that_kernels_cannot_change_has_one_price() -> None:
    assert graph_cost(product("MatMul", [3, 5], [5, 7], [3, 7])).with_kernels is None


def test_an_update_of_adamw_reads_and_writes_vectors(tiny: Any) -> None:
    """5 operators of two vectors and a result, 8 of one vector and a result; the kernel reads four and writes three."""
    vit = tiny("fedavg").vit
    method = make_method("fedavg", {"optimizer": "adamw"})
    cost = graph_cost(export_unverified(method, vit, method_batch(method, vit))["update"])
    assert sum(node.vectors for node in cost.nodes) == 5 * 3 + 8 * 2
    assert cost.with_kernels
    assert sum(node.vectors for node in cost.with_kernels.nodes) == 4 + 3


# --- where a product belongs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "place"),
    [
        ("blocks.0.attn.qkv.weight", ("block 0", "attention")),
        ("blocks.11.mlp.fc1.bias", ("block 11", "mlp")),
        ("blocks.3.norm2.weight", ("block 3", "norm2")),
        ("twin.blocks.3.attn.proj.weight", ("block 3", "attention")),
        ("patch_embed.proj.weight", ("embedding", "embedding")),
        ("pos_embed", ("embedding", "embedding")),
        ("cls_token", ("embedding", "embedding")),
        ("head.weight", ("head", "head")),
        ("fc_norm.bias", ("head", "head")),
        ("norm.weight", ("head", "head")),
        ("extra_head.weight", ("head", "head")),
        ("alpha", ("alpha", "alpha")),
        ("prompts.0", ("prompts", "prompts")),
    ],
)
def test_a_tensors_block_follows_from_its_name(tensor: str, place: tuple[str, str]) -> None:
    assert block_of(tensor) == place


Shares = dict[tuple[str, str], tuple[int, int]]


def shares_of(cost: GraphCost, runs: int = 1) -> Shares:
    return {(block, kind): (forward, backward) for block, kind, forward, backward in flop_shares(cost, runs)}


def expect_shares(kept: int, trained: int, *, last_trained: bool, position_product: bool) -> Shares:
    """FLOPs of each part for 8 samples of 1 + `kept` tokens. Linear layers take their values' gradient (as much as the
    forward pass) and, where they are trained, their weights' (as much again); products of activations take both
    operands' gradients anywhere. Pictures need none."""
    n = 1 + kept
    position = P * kept * D if position_product else 0
    parts = {("embedding", "embedding"): (kept * V * D, kept * V * D + position)}
    for block in range(L - 1):
        times = 2 if block < trained else 1
        parts[f"block {block}", "attention"] = (4 * n * D**2 + attention(n), times * 4 * n * D**2 + 2 * attention(n))
        parts[f"block {block}", "mlp"] = (8 * n * D**2, times * 8 * n * D**2)
    times = 2 if last_trained else 1
    projections = (2 * n + 2) * D**2
    parts[f"block {L - 1}", "attention"] = (
        projections + last_attention(n),
        times * projections + 2 * last_attention(n),
    )
    parts[f"block {L - 1}", "mlp"] = (8 * D**2, times * 8 * D**2)
    parts["head", "head"] = (D * C, 2 * D * C)
    return {place: (2 * B * forward, 2 * B * backward) for place, (forward, backward) in parts.items()}


def test_the_shares_of_a_step_of_eftvit(tiny: Any) -> None:
    """Two local blocks are trained, the last one only lets gradients through."""
    cost = graph_cost(tiny("eftvit").graphs["train"].content)
    expected = expect_shares(4, 2, last_trained=False, position_product=True)
    assert shares_of(cost) == expected
    assert list(shares_of(cost)) == list(expected), "in the model's order"
    assert sum(forward + backward for forward, backward in shares_of(cost).values()) == cost.flops


def test_the_shares_of_a_step_of_fedavg(tiny: Any) -> None:
    """All is trained; positions of all patches in order need no product."""
    cost = graph_cost(tiny("fedavg").graphs["train"].content)
    assert shares_of(cost) == expect_shares(16, L, last_trained=True, position_product=False)


def test_shares_of_several_runs_and_of_an_answer(tiny: Any) -> None:
    """Nothing of an answer is backward."""
    cost = graph_cost(tiny("fedavg").graphs["predict"].content)
    once, thrice = shares_of(cost), shares_of(cost, 3)
    assert thrice == {place: (3 * forward, 0) for place, (forward, _) in once.items()}
    assert sum(forward for forward, _ in once.values()) == cost.flops


def test_each_blocks_products_by_kind(tiny: Any) -> None:
    """A block has two products of activations, each with two gradients; a trained one has four weights' gradients. The
    last block's first layer is split in two, so it has five linear layers. The embedding's gradients are those of the
    patches' projection and of the positions."""
    cost = graph_cost(tiny("eftvit").graphs["train"].content)
    kinds = Counter((each.block, each.product.kind) for each in cost.nodes if each.product)
    assert kinds == {
        ("embedding", "weights"): 1,
        ("embedding", "gradient"): 2,
        **{(f"block {block}", "weights"): 8 for block in (0, 1)},
        **{(f"block {block}", "gradient"): 4 for block in (0, 1)},
        ("block 2", "weights"): 10,
        **{(f"block {block}", "attention"): 6 for block in range(L)},
        ("head", "weights"): 2,
        ("head", "gradient"): 1,
    }


def test_a_whole_step_has_its_gradients_where_their_tensors_are(tiny: Any) -> None:
    """APFL's step updates the weights itself, so it reads no sums of gradients. It has two models of everything, and
    works with mixtures of their weights: each part costs twice what FedAvg's does. The loss is that of one of them."""
    cost = graph_cost(tiny("apfl").graphs["train"].content)
    single = expect_shares(16, L, last_trained=True, position_product=False)
    expected = {place: (forward, forward + 2 * backward) for place, (forward, backward) in single.items()}
    assert shares_of(cost) == expected


@pytest.mark.parametrize(
    ("option", "precision", "kind", "unpacked"),
    [
        ("frozen_precision", "fp16", "weights", "Cast"),
        ("frozen_precision", "int8", "weights", "DequantizeLinear"),
        ("compute", "int8", "integers", "QuantizeLinear"),
        ("compute", "fp16", "halves", "Cast"),
    ],
)
def test_weights_that_are_unpacked_belong_to_their_block(
    option: str, precision: str, kind: ProductKind, unpacked: str, tiny: Any
) -> None:
    """The one frozen block of the tiny model costs the same FLOPs."""
    method, vit, batch, graphs = tiny("eftvit")
    other = export_unverified(replace(method, **{option: precision}), vit, batch)
    cost, plain = graph_cost(other["train"]), graph_cost(graphs["train"].content)
    assert shares_of(cost) == shares_of(plain)
    frozen = [each for each in cost.nodes if each.block == "block 2"]
    products = Counter(each.product.kind for each in frozen if each.product)
    assert products == {kind: 10, "attention": 6}
    assert any(each.op == unpacked for each in frozen)
    assert not any(each.op == unpacked for each in cost.nodes if each.block in ("block 0", "block 1"))


@pytest.mark.parametrize("name", ["fedavg", "fed_prompt", "fedrod", "fedtp"])
def test_masks_reduce_the_work_of_every_method(name: str, tiny: Any) -> None:
    """4 of 16 patches are left, beside class token and prompts. An answer reads all patches as before."""
    method, vit, _, graphs = tiny(name)
    masked = replace(method, mask=0.75)
    other = export_unverified(masked, vit, method_batch(masked, vit))
    assert graph_cost(other["train"]).flops < 0.6 * graph_cost(graphs["train"].content).flops
    assert graph_cost(other["predict"]).flops == graph_cost(graphs["predict"].content).flops


def test_a_method_has_its_defaults_options(tiny: Any) -> None:
    """What the counts above were derived for."""
    method = tiny("eftvit").method
    assert (method.local_blocks, method.mask, method.recompute) == (2, 0.75, False)
    assert (method.frozen_precision, method.compute) == ("fp32", "fp32")
    assert make_method("eftvit").mask == 0.75


# --- memory -------------------------------------------------------------------------------------------

UNIT = 64  # floats: the 256 bytes that a piece of memory is rounded up to


def peak(nodes: Sequence[onnx.NodeProto], between: Values, outputs: Values | None = None) -> int:
    """In units of 256 bytes, of a graph from `x` (64 floats) to `y`."""
    cost = graph_cost(by_hand(nodes, {"x": (UNIT,)}, outputs or {"y": (UNIT,)}, between))
    assert cost.activation_bytes % 256 == 0
    return cost.activation_bytes // 256


def test_operators_write_over_what_nobody_reads_again() -> None:
    # a chain needs one piece: Each operator writes over what it read; the last writes to the caller's memory
    nodes = [node("Exp", "x", "a"), node("Sqrt", "a", "b"), node("Neg", "b", "c"), node("Neg", "c", "y")]
    assert peak(nodes, {"a": (UNIT,), "b": (UNIT,), "c": (UNIT,)}) == 1
    nodes = [node("Exp", "x", "a"), node("Transpose", "a", "b", perm=[0]), node("Neg", "b", "y")]
    assert peak(nodes, {"a": (UNIT,), "b": (UNIT,)}) == 2
    nodes = [node("Exp", "x", "a"), node("Sqrt", "a", "b"), node("Add", "a b", "y")]
    assert peak(nodes, {"a": (UNIT,), "b": (UNIT,)}) == 2
    # an operand of another size is not written over: (64,) + (4, 1) gives four pieces beside the one that was read
    nodes = [node("Exp", "x", "a"), node("Add", "a b", "c"), node("ReduceSum", "c", "y")]
    assert peak(nodes, {"a": (UNIT,), "c": (4, UNIT)}) == 5


def test_pieces_are_rounded_up() -> None:
    """65 floats are 260 bytes: two units."""
    assert peak([node("Expand", "x", "a"), node("Slice", "a", "y")], {"a": (UNIT + 1,)}) == 2


def test_views_and_what_lies_elsewhere_need_no_piece() -> None:
    # views lie where their operand lies: The operand is not free before the view's last reader, which may write
    # over it
    view = [node("Exp", "x", "a"), node("Reshape", "a s", "v"), node("Identity", "v", "w")]
    sizes: Values = {"a": (UNIT,), "v": (8, 8), "w": (8, 8), "b": (8, 8)}
    assert peak([*view, node("Sqrt", "w", "b"), node("Flatten", "b", "y")], sizes) == 1
    assert peak([*view, node("Sqrt", "w", "b"), node("Concat", "a b", "y", axis=0)], sizes) == 2
    assert peak([node("ConstantOfShape", "x", "a"), node("Slice", "a", "y")], {"a": (3, UNIT)}) == 3
    # outputs do not count: Nor do inputs: both are the caller's memory
    nodes = [node("Expand", "x", "a"), node("Slice", "a", "y")]
    assert peak(nodes, {}, {"y": (UNIT,), "a": (9, UNIT)}) == 0
    # what nobody reads is freed at once: Three pieces, of which two lie there for a moment only; then another
    # operator needs two
    nodes = [node("Split", "x", "a b c", axis=0), node("Expand", "a", "d"), node("Slice", "d", "y")]
    assert peak(nodes, {"a": (UNIT,), "b": (UNIT,), "c": (UNIT,), "d": (2, UNIT)}) == 3


def branches(first: str, second: str) -> list[onnx.NodeProto]:
    """Two ways from `x`, each over a larger value."""
    return [
        node("Expand", "x", "A", name="A"),
        *([node("Slice", "A", "a")] if first == "one after another" else [node("Expand", "x", "B")]),
        *([node("Expand", "x", "B")] if first == "one after another" else [node("Slice", "A", "a")]),
        node("Slice", "B", "b"),
        node("Concat", second, "y", axis=0),
    ]


@pytest.mark.parametrize("written", ["one after another", "side by side"])
@pytest.mark.parametrize("operands", ["a b", "b a"])
def test_the_order_of_execution_is_depth_first_and_the_later_node_first(written: str, operands: str) -> None:
    """However the graph is written: way B (4 units, then 1) is done first, since its last node is the later one; then
    A's 16 come beside B's result and A's own: 18. The other way round it would be 17, and side by side 20."""
    sizes: Values = {"A": (16, UNIT), "B": (4, UNIT), "a": (UNIT,), "b": (UNIT,)}
    assert peak(branches(written, operands), sizes) == 18
