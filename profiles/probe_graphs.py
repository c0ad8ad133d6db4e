"""The graphs that a device measures its speed with: one operator each, of any size. Written here, shipped as files.

Devices do not have onnx to make them; `python -m profiles.probe_graphs` writes those of `GRAPHS` anew.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

FOLDER = Path(__file__).parent / "probes" / "graphs"
OPSET, IR_VERSION = 20, 10
"""Versions of the operator sets in training graphs."""
CHAIN = 200
"""Operators one after another, on one number: what an operator takes at least."""

_FLOAT, _HALF, _INT8, _UINT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8

Input = tuple[str, int, int]
"""Name, type, rank; all lengths are free."""


def _graph(nodes: Sequence[onnx.NodeProto], inputs: Sequence[Input], outputs: Sequence[Input]) -> bytes:
    def describe_inputs(values: Sequence[Input]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(rank)])
            for name, kind, rank in values
        ]

    domains = {"": OPSET} | {node.domain: 1 for node in nodes if node.domain}
    graph = helper.make_graph(list(nodes), "probe", describe_inputs(inputs), describe_inputs(outputs))
    return _encode(graph, domains)


def _encode(graph: onnx.GraphProto, domains: dict[str, int]) -> bytes:
    opsets = [helper.make_opsetid(name, number) for name, number in domains.items()]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="fedvit")
    model.ir_version = IR_VERSION
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _one(op: str, operands: Sequence[Input], rank: int, result: int = _FLOAT, **attributes: Any) -> bytes:
    node = helper.make_node(op, [name for name, _, _ in operands], ["y"], **attributes)
    return _graph([node], operands, [("y", result, rank)])


def _chain() -> bytes:
    names = ["x", *(f"v{number}" for number in range(1, CHAIN)), "y"]
    nodes = [helper.make_node("Add", [names[i], "b"], [names[i + 1]]) for i in range(CHAIN)]
    return _graph(nodes, [("x", _FLOAT, 1), ("b", _FLOAT, 1)], [("y", _FLOAT, 1)])


def _step() -> bytes:
    """A whole training step of the smallest model: one weight for each value of a pixel and each of two classes.

    Names are those of fedvit.program; a batch has two images of one pixel.
    """
    number, integer = TensorProto.FLOAT, TensorProto.INT64
    constants: dict[str, tuple[int, list[int], list[float]]] = {
        "axis": (integer, [1], [1]),
        "depth": (integer, [1], [2]),
        "values": (number, [2], [0.0, 1.0]),
    }
    nodes = [
        *(
            helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, shape, numbers))
            for name, (kind, shape, numbers) in constants.items()
        ),
        helper.make_node("Squeeze", ["batch/patches", "axis"], ["pixels"]),
        helper.make_node("MatMul", ["pixels", "tensor/weight"], ["logits"]),
        helper.make_node("OneHot", ["batch/labels", "depth", "values"], ["wanted"]),
        helper.make_node("Unsqueeze", ["batch/weight", "axis"], ["weights"]),
        helper.make_node("ReduceSum", ["batch/weight"], ["total"], keepdims=0),
        helper.make_node("Div", ["weights", "total"], ["shares"]),
        helper.make_node("LogSoftmax", ["logits"], ["logs"], axis=1),
        helper.make_node("Mul", ["wanted", "logs"], ["right"]),
        helper.make_node("Mul", ["right", "shares"], ["parts"]),
        helper.make_node("ReduceSum", ["parts"], ["gain"], keepdims=0),
        helper.make_node("Neg", ["gain"], ["metric/loss"]),
        helper.make_node("Softmax", ["logits"], ["answers"], axis=1),
        helper.make_node("Sub", ["answers", "wanted"], ["errors"]),
        helper.make_node("Mul", ["errors", "shares"], ["weighted"]),
        helper.make_node("Transpose", ["pixels"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["turned", "weighted"], ["gradient"]),
        helper.make_node("Mul", ["gradient", "hyper/lr"], ["change"]),
        helper.make_node("Sub", ["tensor/weight", "change"], ["new/tensor/weight"]),
    ]
    inputs = {"batch/patches": [2, 1, 3], "batch/weight": [2], "tensor/weight": [3, 2], "hyper/lr": []}
    described = [helper.make_tensor_value_info(name, number, shape) for name, shape in inputs.items()]
    described.append(helper.make_tensor_value_info("batch/labels", integer, [2]))
    outputs = {"metric/loss": [], "new/tensor/weight": [3, 2]}
    results = [helper.make_tensor_value_info(name, number, shape) for name, shape in outputs.items()]
    return _encode(helper.make_graph(nodes, "step", described, results), {"": OPSET})


_A, _B, _X = ("a", _FLOAT, 2), ("b", _FLOAT, 2), ("x", _FLOAT, 3)
_SCALE, _ZERO = ("s", _FLOAT, 1), ("z", _INT8, 1)

GRAPHS: dict[str, bytes] = {
    "weights": _one("Gemm", [_A, _B, ("c", _FLOAT, 1)], 2, transB=1),
    "gradient": _one("Gemm", [_A, _B, ("c", _FLOAT, 2)], 2, transA=1),
    "attention": _one("MatMul", [("a", _FLOAT, 3), ("b", _FLOAT, 3)], 3),
    "integers": _one(
        "MatMulIntegerToFloat",
        [("a", _UINT8, 2), ("b", _INT8, 2), ("s", _FLOAT, 0), ("t", _FLOAT, 1)],
        2,
        domain="com.microsoft",
    ),
    "halves": _one("MatMul", [("a", _HALF, 2), ("b", _HALF, 2)], 2, _HALF),
    "Add": _one("Add", [_X, ("b", _FLOAT, 3)], 3),
    "Transpose": _one("Transpose", [_X], 3, perm=[1, 0, 2]),
    "Softmax": _one("Softmax", [_X], 3, axis=-1),
    "LayerNormalization": _one("LayerNormalization", [_X, ("s", _FLOAT, 1), ("b", _FLOAT, 1)], 3, axis=-1),
    "Erf": _one("Erf", [_X], 3),
    "Exp": _one("Exp", [_X], 3),
    "Gelu": _one("Gelu", [_X], 3),
    "ReduceMean": _graph(
        [
            helper.make_node("Constant", [], ["axes"], value=helper.make_tensor("axes", TensorProto.INT64, [1], [2])),
            helper.make_node("ReduceMean", ["x", "axes"], ["y"]),
        ],
        [_X],
        [("y", _FLOAT, 3)],
    ),
    "Concat": _one("Concat", [_X, ("b", _FLOAT, 3)], 3, axis=1),
    "DequantizeLinear": _one("DequantizeLinear", [("x", _INT8, 2), _SCALE, _ZERO], 2, axis=0),
    "chain": _chain(),
    "step": _step(),
}
"""By kind of product, or by operator."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in GRAPHS.items():
        (FOLDER / f"{name}.onnx").write_bytes(content)


if __name__ == "__main__":
    main()
