"""The tensors of a graph, and the memory that they need by liveness."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import onnx
from onnx import TensorProto

Shape = tuple[int, ...]


class GraphTensor(NamedTuple):
    """A value of a graph."""

    shape: Shape
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


_ITEM_BYTES = {
    TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.DOUBLE: 8, TensorProto.INT64: 8, TensorProto.INT32: 4,
    TensorProto.INT8: 1, TensorProto.UINT8: 1, TensorProto.BOOL: 1,
}  # fmt: skip


def collect_tensors(graph: onnx.GraphProto) -> dict[str, GraphTensor]:
    """Collect the values whose dimensions are all known."""
    tensors = {
        constant.name: GraphTensor(tuple(constant.dims), _ITEM_BYTES.get(constant.data_type, 4))
        for constant in graph.initializer
    }
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        # without a shape not even the rank is known; a scalar has one, without dimensions
        if kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            shape = tuple(dim.dim_value for dim in kind.shape.dim)
            tensors[value.name] = GraphTensor(shape, _ITEM_BYTES.get(kind.elem_type, 4))
    return tensors


VIEWS = {"Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "ConstantOfShape"}
"""Operators that only change a shape."""
_IN_PLACE = {
    "Add", "Sub", "Mul", "Div", "Neg", "Exp", "Erf", "Sqrt", "Pow", "Tanh", "Abs", "Clip", "Softmax", "LogSoftmax",
    "Gelu", "Relu", "Sigmoid", "Where", "Reciprocal",
}  # fmt: skip
"""Operators that onnxruntime lets write in place of an operand that is not read afterwards."""
_ALIGNED = 256


def compute_peak_bytes(graph: onnx.GraphProto, tensors: Mapping[str, GraphTensor]) -> int:
    """Compute the most memory that values between inputs and outputs need at one time.

    The order of execution and the reuse of memory are onnxruntime's: views share memory, and some operators write over
    an operand of their result's size that is read for the last time. Outputs lie in memory of the caller.
    """
    order = _execution_order(graph)
    last_use: dict[str, int] = {}
    root: dict[str, str] = {}  # a value -> the one whose memory it lies in
    outside = {value.name for value in (*graph.input, *graph.output)} | {tensor.name for tensor in graph.initializer}

    def lies_in(name: str) -> str:
        return root.get(name, name)

    for node in graph.node:
        if node.op_type in VIEWS and node.op_type != "ConstantOfShape" and node.input:
            root[node.output[0]] = lies_in(node.input[0])
    for place, node in enumerate(order):
        for name in node.input:
            last_use[lies_in(name)] = place
    live: dict[str, int] = {}
    now = peak = 0
    for place, node in enumerate(order):
        freed = [lies_in(name) for name in node.input if last_use.get(lies_in(name)) == place]
        for name in node.output:
            if not name or name in root or name in outside:
                continue
            size = -(-(tensors[name].size_bytes if name in tensors else 0) // _ALIGNED) * _ALIGNED
            reused = next((old for old in freed if node.op_type in _IN_PLACE and live.get(old) == size), None)
            if reused is not None:
                freed = [old for old in freed if old != reused]
                now -= live.pop(reused)
            live[name] = size
            now += size
        peak = max(peak, now)
        unused = [name for name in node.output if name in live and name not in last_use]
        for name in {*freed, *unused}:
            now -= live.pop(name, 0)
    return peak


def _execution_order(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes in onnxruntime's default order: depth first from the last unread node, last operand first."""
    nodes = list(graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output}
    before = [sorted({maker[name] for name in node.input if name in maker}) for node in nodes]
    read = {index for operands in before for index in operands}
    stack = [(index, False) for index in range(len(nodes)) if index not in read]
    seen: set[int] = set()
    order: list[onnx.NodeProto] = []
    while stack:
        index, leaving = stack.pop()
        if leaving:
            order.append(nodes[index])
        elif index not in seen:
            seen.add(index)
            stack.append((index, True))
            stack += [(operand, False) for operand in before[index] if operand not in seen]
    return order
