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
    opsets = [helper.make_opsetid(name, number) for name, number in domains.items()]
    model = helper.make_model(
        helper.make_graph(list(nodes), "probe", describe_inputs(inputs), describe_inputs(outputs)),
        opset_imports=opsets,
        producer_name="fedvit",
    )
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
}
"""By kind of product, or by operator."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, content in GRAPHS.items():
        (FOLDER / f"{name}.onnx").write_bytes(content)


if __name__ == "__main__":
    main()
