"""The operators of a trace that have an ONNX form: one function for each.

Those of transformers and of convolutional networks are in `transformers` and `convolutions`."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import fx

import fedvit.methods.packed  # noqa: F401 - registers the operator
from export.graph import Unsupported, Value, number_type, permute, swap_last_axes
from export.products import StepGraph
from export.rules import Rule, dtype_of, lowers, shape_of

aten = torch.ops.aten
unpack = torch.ops.fedvit.unpack.default


@lowers(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(graph: StepGraph, node: fx.Node, value: Value, **_: Any) -> Value:
    return value


@lowers(aten.view.default, aten._unsafe_view.default, aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default)
def _reshape(graph: StepGraph, node: fx.Node, value: Value, *_: Any) -> Value:
    return graph.reshape(value, shape_of(node))


@lowers(aten.permute.default)
def _permute(graph: StepGraph, node: fx.Node, value: Value, order: Sequence[int]) -> Value:
    return graph.permute(value, tuple(axis % len(order) for axis in order))


@lowers(aten.expand.default)
def _expand(graph: StepGraph, node: fx.Node, value: Value, *_: Any) -> Value:
    return graph.expand(value, shape_of(node))


def _elementwise(kind: str) -> Rule:
    def rule(graph: StepGraph, node: fx.Node, left: Any, right: Any, alpha: float = 1) -> Value:
        dtype = dtype_of(node)
        if kind in ("Equal", "Greater", "Less"):
            dtype = torch.result_type(*(_example(side) for side in (left, right)))
        left, right = (graph.cast(_as_value(graph, side, dtype), dtype) for side in (left, right))
        if alpha != 1:
            right = graph.with_number("Mul", right, alpha)
        if kind == "Add":
            for product, other, argument in ((left, right, node.args[0]), (right, left, node.args[1])):
                doubled = left.name == right.name
                if not doubled and _is_product_for(node, argument) and (fused := graph.add_to_product(product, other)):
                    return fused
        return graph.binary(kind, left, right, shape_of(node), dtype_of(node))

    return rule


for _kind, _operators in {
    "Add": (aten.add.Tensor, aten.add.Scalar),
    "Sub": (aten.sub.Tensor, aten.sub.Scalar),
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
    "Equal": (aten.eq.Tensor, aten.eq.Scalar),
    "Greater": (aten.gt.Tensor, aten.gt.Scalar),
    "Less": (aten.lt.Tensor, aten.lt.Scalar),
}.items():
    lowers(*_operators)(_elementwise(_kind))


def _is_product_for(reader: fx.Node, node: Any) -> bool:
    """Return whether `node` is a matrix product that only `reader` reads."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.target is aten.mm.default:
            return True
        if node.target is not aten.permute.default:
            return False
        node = node.args[0]
    return False


def _unary(kind: str) -> Rule:
    return lambda graph, node, value: graph.unary(kind, value)


for _kind, _operator in {
    "Neg": aten.neg.default,
    "Sqrt": aten.sqrt.default,
    "Tanh": aten.tanh.default,
    "Log": aten.log.default,
    "Exp": aten.exp.default,
    "Reciprocal": aten.reciprocal.default,
    "Relu": aten.relu.default,
    "Sigmoid": aten.sigmoid.default,
}.items():
    lowers(_operator)(_unary(_kind))


@lowers(aten.pow.Tensor_Scalar)
def _power(graph: StepGraph, node: fx.Node, value: Value, exponent: float) -> Value:
    if exponent == 1:
        return value
    if exponent == 2:
        return graph.binary("Mul", value, value, value.shape, value.dtype)
    return graph.with_number("Pow", value, exponent)


@lowers(aten.pow.Scalar)
def _power_of(graph: StepGraph, node: fx.Node, base: float, exponent: Value) -> Value:
    number = graph.fill(base, exponent.shape, exponent.dtype)
    return graph.binary("Pow", number, exponent, exponent.shape, exponent.dtype)


@lowers(aten.remainder.Scalar)
def _remainder(graph: StepGraph, node: fx.Node, value: Value, divisor: float) -> Value:
    """Lower aten.remainder, whose result has the divisor's sign; ONNX has that for whole numbers alone."""
    dtype = dtype_of(node)
    value = graph.cast(value, dtype)
    if not dtype.is_floating_point:
        return graph.with_number("Mod", value, divisor)
    number = graph.fill(divisor, (), dtype)
    rest = graph.one("Mod", [graph.plain(value), number.name], value.shape, dtype, fmod=1)
    has_other_sign = graph.binary(
        "Less" if divisor > 0 else "Greater", rest, graph.fill(0, (), dtype), value.shape, torch.bool
    )
    updated = graph.binary("Add", rest, number, value.shape, dtype)
    return graph.one("Where", [has_other_sign.name, updated.name, rest.name], value.shape, dtype)


@lowers(aten.clamp.default)
def _clamp(graph: StepGraph, node: fx.Node, value: Value, low: float | None = None, high: float | None = None) -> Value:
    bounds = ["" if b is None else graph.constant(np.array(b, number_type(value.dtype))) for b in (low, high)]
    [name] = graph.node("Clip", [value.name, *bounds], graph.shapes[value.name])
    return replace(value, name=name, number=None)


@lowers(aten.where.self)
def _where(graph: StepGraph, node: fx.Node, condition: Value, left: Value, right: Value) -> Value:
    dtype = dtype_of(node)
    names = [graph.broadcast(v) for v in (condition, graph.cast(left, dtype), graph.cast(right, dtype))]
    covered = tuple(np.broadcast_shapes(*(graph.shapes[name] for name in names)))
    made = graph.one("Where", names, covered, dtype)
    return made if covered == shape_of(node) else Value(made.name, shape_of(node), dtype, repeated=True)


@lowers(aten._to_copy.default)
def _cast(graph: StepGraph, node: fx.Node, value: Value, **_: Any) -> Value:
    return graph.cast(value, dtype_of(node))


@lowers(aten.full.default, aten.scalar_tensor.default, aten.full_like.default)
def _full(graph: StepGraph, node: fx.Node, *arguments: Any, **_: Any) -> Value:
    number = arguments[0] if node.target is aten.scalar_tensor.default else arguments[1]
    return graph.fill(number, shape_of(node), dtype_of(node))


@lowers(aten.arange.start_step)
def _arange(graph: StepGraph, node: fx.Node, start: int, end: int, step: int = 1, **_: Any) -> Value:
    return as_constant(graph, torch.arange(start, end, step, dtype=dtype_of(node)))


def _reduction(kind: str) -> Rule:
    def rule(
        graph: StepGraph, node: fx.Node, value: Value, axes: Sequence[int] | None = None, keep: bool = False, **_: Any
    ) -> Value:
        return graph.reduce(kind, value, axes or range(len(value.shape)), keep)

    return rule


lowers(aten.sum.default, aten.sum.dim_IntList)(_reduction("ReduceSum"))
lowers(aten.mean.default, aten.mean.dim)(_reduction("ReduceMean"))
lowers(aten.amax.default)(_reduction("ReduceMax"))


@lowers(aten.mm.default)
def _mm(graph: StepGraph, node: fx.Node, left: Value, right: Value) -> Value:
    if _ends_swapped(node):  # (left right)^T = right^T left^T needs no pass of its own
        return graph.permute(graph.gemm(graph.permute(right, (1, 0)), graph.permute(left, (1, 0))), (1, 0))
    return graph.gemm(left, right)


@lowers(aten.addmm.default)
def _addmm(graph: StepGraph, node: fx.Node, bias: Value, left: Value, right: Value) -> Value:
    return graph.gemm(left, right, bias)


@lowers(aten.bmm.default)
def _bmm(graph: StepGraph, node: fx.Node, left: Value, right: Value) -> Value:
    if _ends_swapped(node):
        swap = (0, 2, 1)
        return graph.permute(graph.matmul(graph.permute(right, swap), graph.permute(left, swap)), swap)
    return graph.matmul(left, right)


def _ends_swapped(node: fx.Node) -> bool:
    """Return whether a product is only used with its last two axes exchanged."""
    last, turned = shape_of(node)[-2:], False
    while len(node.users) == 1:
        [node] = node.users
        if node.target is aten.permute.default:
            order = cast(Sequence[int], node.args[1])
            if tuple(axis % len(order) for axis in order) != swap_last_axes(len(order)):
                break
            turned = not turned
        else:
            regrouped = node.target in (aten.view.default, aten._unsafe_view.default, aten.clone.default)
            if not regrouped or set(shape_of(node)[-2:]) != set(last):
                break
    return turned


@lowers(aten.slice.Tensor)
def _slice(
    graph: StepGraph, node: fx.Node, value: Value, axis: int = 0, start: int = 0, end: int = 2**63 - 1, step: int = 1
) -> Value:
    if shape_of(node) == value.shape:
        return value
    bounds = [graph.constant(np.array([number], np.int64)) for number in (start or 0, end, axis, step)]
    return graph.one("Slice", [graph.plain(value), *bounds], shape_of(node), value.dtype)


@lowers(aten.select.int)
def _select(graph: StepGraph, node: fx.Node, value: Value, axis: int, index: int) -> Value:
    chosen = graph.constant(np.array(index, np.int64))
    return graph.one("Gather", [graph.plain(value), chosen], shape_of(node), value.dtype, axis=axis)


@lowers(aten.index_select.default)
def _index_select(graph: StepGraph, node: fx.Node, value: Value, axis: int, index: Value) -> Value:
    return graph.one("Gather", [graph.plain(value), graph.plain(index)], shape_of(node), value.dtype, axis=axis)


@lowers(aten.index.Tensor)
def _index(graph: StepGraph, node: fx.Node, value: Value, indices: Sequence[Value | None]) -> Value:
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Unsupported("FV1117", f"indexing by {len(given)} tensors at once has no ONNX form here")
    [(axis, index)] = given
    return graph.one("Gather", [graph.plain(value), graph.plain(index)], shape_of(node), value.dtype, axis=axis)


@lowers(unpack)
def _unpack(graph: StepGraph, node: fx.Node, value: Value, scale: Value) -> Value:
    return replace(value, dtype=dtype_of(node), scale=scale.name)


@lowers(aten.split_with_sizes.default)
def _split(graph: StepGraph, node: fx.Node, value: Value, sizes: Sequence[int], axis: int = 0) -> list[Value]:
    axis %= len(value.shape)
    shapes = [(*value.shape[:axis], size, *value.shape[axis + 1 :]) for size in sizes]
    if value.scale is not None and value.permutation is None and axis == 0:  # the pieces stay packed
        lengths = graph.constant(np.array(sizes, np.int64))
        names = graph.node("Split", [value.name, lengths], *shapes, axis=0)
        scales = [""] * len(sizes)
        if value.scale:
            scales = graph.node("Split", [value.scale, lengths], *((size,) for size in sizes), axis=0)
        return [
            Value(name, shape, value.dtype, scale=scale)
            for name, shape, scale in zip(names, shapes, scales, strict=True)
        ]
    names = graph.node("Split", [graph.plain(value), graph.constant(np.array(sizes, np.int64))], *shapes, axis=axis)
    return [Value(name, shape, value.dtype) for name, shape in zip(names, shapes, strict=True)]


@lowers(aten.unbind.int)
def _unbind(graph: StepGraph, node: fx.Node, value: Value, axis: int = 0) -> list[Value]:
    """The pieces of a view are views of pieces: a transposition has one axis less, and onnxruntime a faster form."""
    axis %= len(value.shape)
    order = value.permutation
    if order is None or value.scale is not None:
        value, order = Value(graph.plain(value), value.shape, value.dtype), tuple(range(len(value.shape)))
    lengths, behind = graph.shapes[value.name], order[axis]
    ones = graph.constant(np.ones(lengths[behind], np.int64))
    cut, whole = ((*lengths[:behind], *kept, *lengths[behind + 1 :]) for kept in ((1,), ()))
    names = graph.node("Split", [value.name, ones], *(cut for _ in range(lengths[behind])), axis=behind)
    rest = tuple(place - (place > behind) for place in order if place != behind)
    return [graph.permute(graph.reshape(Value(name, cut, value.dtype), whole), rest) for name in names]


@lowers(aten.stack.default)
def _stack(graph: StepGraph, node: fx.Node, values: Sequence[Value], axis: int = 0) -> Value:
    """Lower aten.stack. If the result is only transposed, transpose the inputs instead, which saves a copy."""
    shape = shape_of(node)
    axis %= len(shape)
    order = tuple(range(len(shape)))
    readers = [*node.users]
    if len(readers) == 1 and readers[0].target is aten.permute.default:
        order = tuple(place % len(shape) for place in cast(Sequence[int], readers[0].args[1]))
    rest = tuple(place - (place > axis) for place in order if place != axis)
    behind = order.index(axis)
    pieces = []
    for value in values:
        piece = graph.permute(graph.cast(value, dtype_of(node)), rest)
        pieces.append(graph.plain(graph.reshape(piece, (*piece.shape[:behind], 1, *piece.shape[behind:]))))
    made = graph.one("Concat", pieces, permute(shape, order), dtype_of(node), axis=behind)
    return graph.permute(made, tuple(order.index(place) for place in range(len(order))))


@lowers(aten.cat.default)
def _cat(graph: StepGraph, node: fx.Node, values: Sequence[Value], axis: int = 0) -> Value:
    names = [graph.plain(graph.cast(value, dtype_of(node))) for value in values if math.prod(value.shape)]
    return graph.one("Concat", names, shape_of(node), dtype_of(node), axis=axis)


@lowers(aten.topk.default)
def _topk(
    graph: StepGraph,
    node: fx.Node,
    value: Value,
    count: int,
    axis: int = -1,
    largest: bool = True,
    in_order: bool = True,
) -> list[Value]:
    axis %= len(value.shape)
    shape = (*value.shape[:axis], count, *value.shape[axis + 1 :])
    operands = [graph.plain(value), graph.constant(np.array([count], np.int64))]
    names = graph.node("TopK", operands, shape, shape, axis=axis, largest=int(largest), sorted=int(in_order))
    return [Value(names[0], shape, value.dtype), Value(names[1], shape, torch.int64)]


# --- helpers ------------------------------------------------------------------------------------------


def as_constant(graph: StepGraph, value: torch.Tensor) -> Value:
    array = value.detach().numpy()
    if array.size == 1:
        return graph.fill(array.item(), array.shape, value.dtype)
    return Value(graph.constant(array), array.shape, value.dtype)


def _as_value(graph: StepGraph, side: Any, dtype: torch.dtype) -> Value:
    return side if isinstance(side, Value) else graph.fill(side, (), dtype)


def _example(side: Any) -> Any:
    return torch.empty(side.shape, dtype=side.dtype, device="meta") if isinstance(side, Value) else side
