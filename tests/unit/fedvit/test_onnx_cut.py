"""A graph that is cut computes what it computed whole."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper

from fedvit.errors import BadPayload
from fedvit.onnx_cut import Cut, cut_model
from fedvit.onnx_model import Model, read_model, write_model
from tests.support.codes import has_code

ROWS, WIDTH = 4, 8


def make_model(nodes: list[Any], outputs: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> Model:
    """Return a graph of `x` (samples), `w` and `v` (fixed), and `t` (trained)."""
    inputs = {"x": (ROWS, WIDTH), "w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "t": (WIDTH, WIDTH)}

    def ports(values: dict[str, tuple[int, ...]]) -> list[Any]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values.items()]

    graph = helper.make_graph(nodes, "g", ports(inputs), ports(outputs), value_info=ports(shapes))
    model: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return read_model(model.SerializeToString())


def run(model: Model, feeds: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(b"".join(map(bytes, write_model(model, {}, {}))))
    fed = {node.name: feeds[node.name] for node in session.get_inputs()}
    return dict(zip(model.outputs, session.run(list(model.outputs), fed), strict=True))


def assert_equal_to_whole(model: Model, cut: Cut) -> None:
    draw = np.random.default_rng(0)
    feeds = {name: draw.normal(size=port.shape).astype(np.float32) for name, port in model.inputs.items()}
    features = run(cut.features, feeds)
    got = run(cut.rest, feeds | {name: features[value] for name, value in cut.inputs.items()})
    want = run(model, feeds)
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5)


def node(kind: str, inputs: str, output: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


WIDE = (ROWS, WIDTH)
DEEP = [node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("MatMul", "b v", "c")]
SHAPES = {"a": WIDE, "b": WIDE, "c": WIDE}


def test_the_rest_reads_features_in_place_of_samples() -> None:
    model = make_model([*DEEP, node("MatMul", "c t", "y")], {"y": WIDE}, SHAPES)
    cut = cut_model(model, "x", ["w", "v"], "in")
    assert cut
    assert cut.inputs == {"in0": "c"}
    assert set(cut.features.inputs) == {"x", "w", "v"}
    assert set(cut.rest.inputs) == {"t", "in0"}
    assert cut.share == pytest.approx(2 / 3, abs=0.05)
    assert_equal_to_whole(model, cut)


def test_what_follows_from_fixed_tensors_alone_is_in_both_parts() -> None:
    nodes = [node("Transpose", "w", "u"), node("MatMul", "x u", "a"), node("MatMul", "a v", "c")]
    rest = [node("MatMul", "u t", "d"), node("MatMul", "c d", "y")]
    shapes = {"u": (WIDTH, WIDTH), "a": WIDE, "c": WIDE, "d": (WIDTH, WIDTH)}
    model = make_model([*nodes, *rest], {"y": WIDE}, shapes)
    cut = cut_model(model, "x", ["w", "v"], "in")
    assert cut
    assert set(cut.rest.inputs) == {"w", "t", "in0"}
    assert_equal_to_whole(model, cut)


def test_a_feature_may_be_an_output_itself() -> None:
    model = make_model([*DEEP, node("MatMul", "c t", "y")], {"y": WIDE, "c": WIDE}, {"a": WIDE, "b": WIDE})
    cut = cut_model(model, "x", ["w", "v"], "in")
    assert cut
    assert_equal_to_whole(model, cut)


def test_values_that_later_layers_read_past_the_cut_are_features_too() -> None:
    model = make_model([*DEEP, node("MatMul", "c t", "d"), node("Add", "d b", "y")], {"y": WIDE}, {**SHAPES, "d": WIDE})
    cut = cut_model(model, "x", ["w", "v"], "in")
    assert cut
    assert sorted(cut.inputs.values()) == ["b", "c"]
    assert_equal_to_whole(model, cut)


def test_the_cut_is_where_features_are_small() -> None:
    """Behind the sum over an axis, though the layer before it has nearly all of the work."""
    nodes = [*DEEP, node("GlobalAveragePool", "c3", "p"), node("Mul", "p s", "y")]
    nodes.insert(3, node("Reshape", "c three", "c3"))
    model = make_model(
        [node("Constant", "", "three", value_ints=[ROWS, 1, WIDTH]), node("ReduceMean", "t", "s"), *nodes],
        {"y": (ROWS, 1, 1)},
        {**SHAPES, "c3": (ROWS, 1, WIDTH), "p": (ROWS, 1, 1), "s": (1, 1), "three": (3,)},
    )
    cut = cut_model(model, "x", ["w", "v"], "in")
    assert cut
    assert list(cut.inputs.values()) == ["p"]
    assert_equal_to_whole(model, cut)


@pytest.mark.parametrize(
    ("nodes", "fixed"),
    [
        ([*DEEP, node("MatMul", "c t", "y")], ["v"]),  # the first layer is trained
        ([node("Relu", "x", "a"), node("MatMul", "a t", "y")], ["w", "v"]),  # hardly any work is saved
        (
            [
                node("Concat", "x x x", "a", axis=1),
                node("Concat", "w w w", "b", axis=0),
                node("Mul", "a a", "c"),
                node("MatMul", "b t", "d"),
                node("MatMul", "c d", "y"),
            ],
            ["w", "v"],
        ),  # features would be larger than the samples
    ],
    ids=["trained", "little work", "large"],
)
def test_graphs_without_a_place_are_not_cut(nodes: list[Any], fixed: list[str]) -> None:
    shapes = {**SHAPES, "d": (3 * WIDTH, WIDTH)}
    assert cut_model(make_model(nodes, {"y": WIDE}, shapes), "x", fixed, "in") is None


def test_features_of_another_dtype_are_not_kept() -> None:
    half = helper.make_tensor_value_info("d", TensorProto.FLOAT16, WIDE)
    nodes = [*DEEP, node("Cast", "c", "d", to=TensorProto.FLOAT16), node("Cast", "t", "u", to=TensorProto.FLOAT16)]
    nodes += [node("MatMul", "d u", "e"), node("Cast", "e", "y", to=TensorProto.FLOAT)]
    model = make_model(nodes, {"y": WIDE}, SHAPES)
    cut = cut_model(replace(model, values={**model.values, "d": half.SerializeToString()}), "x", ["w", "v"], "in")
    assert cut is None


def test_a_graph_that_does_not_tell_its_shapes_is_refused() -> None:
    model = make_model([*DEEP, node("MatMul", "c t", "y")], {"y": WIDE}, {"a": WIDE, "b": WIDE})
    with pytest.raises(BadPayload, check=has_code("FV2310")):
        cut_model(model, "x", ["w", "v"], "in")
