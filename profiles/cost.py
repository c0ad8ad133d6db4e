"""What a graph costs, counted on the graph that ships."""

import math

import onnx


def count_flops(graph: bytes) -> int:
    """FLOPs of one run: 2 per multiply-add of every MatMul and Gemm; all other operators count 0.

    The convention of torch's FlopCounterMode: elementwise work, softmax and norms are not counted. Raises
    ValueError when a product's shape is unknown, for then the count would be silently too low.
    """
    model = onnx.load_from_string(graph)
    shapes = _shapes(model.graph)
    return sum(int(_product_flops(node, shapes) * _PRODUCTS.get(node.op_type, 0)) for node in model.graph.node)


_PRODUCTS = {"MatMul": 1.0, "Gemm": 1.0, "MatMulIntegerToFloat": 0.5}
"""What counts, and how much of it: two products of integers stand for one of floats."""


def _product_flops(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    if node.op_type not in _PRODUCTS:
        return 0
    left, out = shapes.get(node.input[0]), shapes.get(node.output[0])
    if left is None or out is None:
        raise ValueError(f"{node.op_type} node {node.name!r} has an operand of unknown shape")
    transposed = node.op_type == "Gemm" and any(a.name == "transA" and a.i for a in node.attribute)
    inner = left[0] if transposed else left[-1]
    return 2 * math.prod(out) * inner


def _shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shape of every value whose dimensions are all known."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        dims = value.type.tensor_type.shape.dim
        # without a shape not even the rank is known; a scalar has one, without dimensions
        if value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes[value.name] = tuple(dim.dim_value for dim in dims)
    return shapes
