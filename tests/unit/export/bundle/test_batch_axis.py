"""Small graphs for two images, opened for any number; what sums or chooses over images is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.bundle.batch_axis import open_batch
from fedvit.errors import BadPayload
from fedvit.onnx_model import Model, Port, make_node, read_model, write_model
from tests.support.codes import has_code

BATCH = 2
WEIGHTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
NUMBERS = {
    "rows": (BATCH * 6, 4),
    "split": (BATCH, 2, 3, 4),
    "merged": (3 * BATCH, 8),
    "apart": (3, BATCH, 2, 4),
    "repeated": (BATCH, 1, 4),
    "last": (-1,),
    "middle": (1,),
    "first": (0,),
    "third": (2,),
    "row": (1, 1, 4),
    "torn": (3, 16),
}

Nodes = list[onnx.NodeProto]


def graph(nodes: Nodes, shape: tuple[int, ...]) -> Model:
    """A graph over `x` (2, 6, 4) whose result `y` has a shape."""
    constants = [numpy_helper.from_array(np.array(values, np.int64), name) for name, values in NUMBERS.items()]
    constants.append(numpy_helper.from_array(WEIGHTS, "w"))
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (BATCH, 6, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model), full_check=True)
    return read_model(onnx.shape_inference.infer_shapes(model).SerializeToString())


def open_run(model: Model) -> Callable[[Any], Any]:
    ready = open_batch(model, "x", BATCH, "count")
    ready = replace(
        ready,
        nodes=(make_node("Shape", ["x"], ["count"], start=0, end=1), *ready.nodes),
        inputs={"x": Port(1, ("batch", 6, 4))},
        outputs={"y": Port(1, tuple("" for _ in model.shape("y")))},
    )
    session = onnxruntime.InferenceSession(b"".join(write_model(ready, {}, {})), providers=["CPUExecutionProvider"])
    return lambda x: session.run(["y"], {"x": x})[0]


def make(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], **attributes)


CASES: dict[str, tuple[Nodes, tuple[int, ...], Callable[[Any], Any]]] = {
    "merged with tokens and apart again": (
        [make("Reshape", ["x", "rows"], "a"), make("Gemm", ["a", "w"], "y")],
        (BATCH * 6, 3),
        lambda x: x.reshape(-1, 4) @ WEIGHTS,
    ),
    "behind other axes": (
        [
            make("Reshape", ["x", "split"], "a"),
            make("Transpose", ["a"], "b", perm=[2, 0, 1, 3]),
            make("Reshape", ["b", "merged"], "c"),
            make("Reshape", ["c", "apart"], "d"),
            make("Gather", ["d", "middle"], "e", axis=0),
            make("Gelu", ["e"], "y"),
        ],
        (1, BATCH, 2, 4),
        lambda x: gelu(x.reshape(-1, 2, 3, 4).transpose(2, 0, 1, 3)[1:2]),
    ),
    "a constant repeated for every image": (
        [
            make("ReduceMean", ["x", "middle"], "m", keepdims=1),
            make("Constant", [], "one", value=numpy_helper.from_array(np.ones((1, 1, 4), np.float32))),
            make("Expand", ["one", "repeated"], "many"),
            make("Concat", ["many", "m", "x"], "y", axis=1),
        ],
        (BATCH, 8, 4),
        lambda x: np.concatenate([np.ones((len(x), 1, 4), np.float32), x.mean(axis=1, keepdims=True), x], axis=1),
    ),
    "an axis less": (
        [make("Transpose", ["x"], "a", perm=[1, 0, 2]), make("ReduceSum", ["a", "first"], "y", keepdims=0)],
        (BATCH, 4),
        lambda x: x.sum(axis=1),
    ),
    "a transposed product": (
        [
            make("ReduceSum", ["x", "middle"], "a", keepdims=0),
            make("Transpose", ["a"], "b", perm=[1, 0]),
            make("Gemm", ["w", "b"], "c", transA=1),
            make("Gemm", ["c", "w"], "y", transA=1, transB=1),
        ],
        (BATCH, 4),
        lambda x: x.sum(axis=1) @ WEIGHTS @ WEIGHTS.T,
    ),
}


def gelu(x: Any) -> Any:
    one = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[a, b, c, d] x) => (float[a, b, c, d] y) { y = Gelu(x) }'
    )
    return onnxruntime.InferenceSession(one.SerializeToString()).run(None, {"x": x})[0]


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_images(name: str) -> None:
    nodes, shape, wanted = CASES[name]
    run = open_run(graph(nodes, shape))
    for count in (1, 2, 5):
        x = np.random.default_rng(count).normal(size=(count, 6, 4)).astype(np.float32)
        np.testing.assert_allclose(run(x), wanted(x), rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Nodes, tuple[int, ...]]] = {
    "a sum over the images": ([make("ReduceSum", ["x", "first"], "y", keepdims=0)], (6, 4)),
    "one image chosen": ([make("Gather", ["x", "first"], "y", axis=0)], (1, 6, 4)),
    "a product over the images": (
        [make("ReduceSum", ["x", "third"], "a", keepdims=0), make("Gemm", ["a", "a"], "y", transA=1)],
        (6, 6),
    ),
    # 24 values of an image in rows of 16
    "images torn apart": ([make("Reshape", ["x", "torn"], "y")], (3, 16)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_images_is_refused(name: str) -> None:
    nodes, shape = REFUSED[name]
    with pytest.raises(BadPayload, check=has_code("FV2310")):
        open_batch(graph(nodes, shape), "x", BATCH, "count")


def test_images_from_two_places_are_refused() -> None:
    """Images along rows and along columns of one sum."""
    square = make("ReduceSum", ["x", "middle"], "a", keepdims=0)
    cut = helper.make_node("Split", ["a"], ["b", "c"], axis=1, num_outputs=2)
    turned = make("Transpose", ["b"], "d", perm=[1, 0])
    with pytest.raises(BadPayload, check=has_code("FV2310")):
        open_batch(graph([square, cut, turned, make("Add", ["b", "d"], "y")], (2, 2)), "x", BATCH, "count")


def test_a_graph_without_shapes_is_refused() -> None:
    nodes, shape, _ = CASES["an axis less"]
    model = graph(nodes, shape)
    bare = replace(model, values={})
    with pytest.raises(BadPayload, check=has_code("FV2310")):
        open_batch(bare, "x", BATCH, "count")
