"""The operators of a trace that have an ONNX form: one function for each, in `LOWERED`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import fx

import fedvit.methods.packed  # noqa: F401 - registers the operator
from export.graph import Graph, Shape, Unsupported, Value, number_type, permute, swap_last_axes

aten = torch.ops.aten
unpack = torch.ops.fedvit.unpack.default

Rule = Callable[..., Any]
LOWERED: dict[Any, Rule] = {}


def _lowers(*operators: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        LOWERED.update(dict.fromkeys(operators, rule))
        return rule

    return register


@_lowers(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(graph: Graph, node: fx.Node, value: Value, **_: Any) -> Value:
    return value


@_lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.squeeze.dims,
    aten.squeeze.dim,
    aten.unsqueeze.default,
)
def _reshape(graph: Graph, node: fx.Node, value: Value, *_: Any) -> Value:
    return graph.reshape(value, _shape(node))


@_lowers(aten.permute.default)
def _permute(graph: Graph, node: fx.Node, value: Value, order: Sequence[int]) -> Value:
    return graph.permute(value, tuple(axis % len(order) for axis in order))


@_lowers(aten.expand.default)
def _expand(graph: Graph, node: fx.Node, value: Value, *_: Any) -> Value:
    return graph.expand(value, _shape(node))


def _elementwise(kind: str) -> Rule:
    def rule(graph: Graph, node: fx.Node, left: Any, right: Any, alpha: float = 1) -> Value:
        dtype = _dtype(node)
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
        return graph.binary(kind, left, right, _shape(node), _dtype(node))

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
    _lowers(*_operators)(_elementwise(_kind))


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
    _lowers(_operator)(_unary(_kind))


@_lowers(aten.pow.Tensor_Scalar)
def _power(graph: Graph, node: fx.Node, value: Value, exponent: float) -> Value:
    if exponent == 1:
        return value
    if exponent == 2:
        return graph.binary("Mul", value, value, value.shape, value.dtype)
    return graph.with_number("Pow", value, exponent)


@_lowers(aten.pow.Scalar)
def _power_of(graph: Graph, node: fx.Node, base: float, exponent: Value) -> Value:
    number = graph.fill(base, exponent.shape, exponent.dtype)
    return graph.binary("Pow", number, exponent, exponent.shape, exponent.dtype)


@_lowers(aten.remainder.Scalar)
def _remainder(graph: Graph, node: fx.Node, value: Value, divisor: float) -> Value:
    """Lower aten.remainder, whose result has the divisor's sign; ONNX has that for whole numbers alone."""
    dtype = _dtype(node)
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


@_lowers(aten.clamp.default)
def _clamp(graph: Graph, node: fx.Node, value: Value, low: float | None = None, high: float | None = None) -> Value:
    bounds = ["" if b is None else graph.constant(np.array(b, number_type(value.dtype))) for b in (low, high)]
    [name] = graph.node("Clip", [value.name, *bounds], graph.shapes[value.name])
    return replace(value, name=name, number=None)


@_lowers(aten.where.self)
def _where(graph: Graph, node: fx.Node, condition: Value, left: Value, right: Value) -> Value:
    dtype = _dtype(node)
    names = [graph.broadcast(v) for v in (condition, graph.cast(left, dtype), graph.cast(right, dtype))]
    covered = tuple(np.broadcast_shapes(*(graph.shapes[name] for name in names)))
    made = graph.one("Where", names, covered, dtype)
    return made if covered == _shape(node) else Value(made.name, _shape(node), dtype, repeated=True)


@_lowers(aten._to_copy.default)
def _cast(graph: Graph, node: fx.Node, value: Value, **_: Any) -> Value:
    return graph.cast(value, _dtype(node))


@_lowers(aten.full.default, aten.scalar_tensor.default, aten.full_like.default)
def _full(graph: Graph, node: fx.Node, *arguments: Any, **_: Any) -> Value:
    number = arguments[0] if node.target is aten.scalar_tensor.default else arguments[1]
    return graph.fill(number, _shape(node), _dtype(node))


@_lowers(aten.arange.start_step)
def _arange(graph: Graph, node: fx.Node, start: int, end: int, step: int = 1, **_: Any) -> Value:
    return as_constant(graph, torch.arange(start, end, step, dtype=_dtype(node)))


def _reduction(kind: str) -> Rule:
    def rule(
        graph: Graph, node: fx.Node, value: Value, axes: Sequence[int] | None = None, keep: bool = False, **_: Any
    ) -> Value:
        return graph.reduce(kind, value, axes or range(len(value.shape)), keep)

    return rule


_lowers(aten.sum.default, aten.sum.dim_IntList)(_reduction("ReduceSum"))
_lowers(aten.mean.default, aten.mean.dim)(_reduction("ReduceMean"))
_lowers(aten.amax.default)(_reduction("ReduceMax"))


@_lowers(aten.mm.default)
def _mm(graph: Graph, node: fx.Node, left: Value, right: Value) -> Value:
    if _ends_swapped(node):  # (left right)^T = right^T left^T needs no pass of its own
        return graph.permute(graph.gemm(graph.permute(right, (1, 0)), graph.permute(left, (1, 0))), (1, 0))
    return graph.gemm(left, right)


@_lowers(aten.addmm.default)
def _addmm(graph: Graph, node: fx.Node, bias: Value, left: Value, right: Value) -> Value:
    return graph.gemm(left, right, bias)


@_lowers(aten.bmm.default)
def _bmm(graph: Graph, node: fx.Node, left: Value, right: Value) -> Value:
    if _ends_swapped(node):
        swap = (0, 2, 1)
        return graph.permute(graph.matmul(graph.permute(right, swap), graph.permute(left, swap)), swap)
    return graph.matmul(left, right)


def _ends_swapped(node: fx.Node) -> bool:
    """Return whether a product is only used with its last two axes exchanged."""
    last, turned = _shape(node)[-2:], False
    while len(node.users) == 1:
        [node] = node.users
        if node.target is aten.permute.default:
            order = cast(Sequence[int], node.args[1])
            if tuple(axis % len(order) for axis in order) != swap_last_axes(len(order)):
                break
            turned = not turned
        else:
            regrouped = node.target in (aten.view.default, aten._unsafe_view.default, aten.clone.default)
            if not regrouped or set(_shape(node)[-2:]) != set(last):
                break
    return turned


@_lowers(aten.slice.Tensor)
def _slice(
    graph: Graph, node: fx.Node, value: Value, axis: int = 0, start: int = 0, end: int = 2**63 - 1, step: int = 1
) -> Value:
    if _shape(node) == value.shape:
        return value
    bounds = [graph.constant(np.array([number], np.int64)) for number in (start or 0, end, axis, step)]
    return graph.one("Slice", [graph.plain(value), *bounds], _shape(node), value.dtype)


@_lowers(aten.select.int)
def _select(graph: Graph, node: fx.Node, value: Value, axis: int, index: int) -> Value:
    chosen = graph.constant(np.array(index, np.int64))
    return graph.one("Gather", [graph.plain(value), chosen], _shape(node), value.dtype, axis=axis)


@_lowers(aten.index_select.default)
def _index_select(graph: Graph, node: fx.Node, value: Value, axis: int, index: Value) -> Value:
    return graph.one("Gather", [graph.plain(value), graph.plain(index)], _shape(node), value.dtype, axis=axis)


@_lowers(aten.index.Tensor)
def _index(graph: Graph, node: fx.Node, value: Value, indices: Sequence[Value | None]) -> Value:
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Unsupported(f"indexing by {len(given)} tensors at once has no ONNX form here")
    [(axis, index)] = given
    return graph.one("Gather", [graph.plain(value), graph.plain(index)], _shape(node), value.dtype, axis=axis)


@_lowers(unpack)
def _unpack(graph: Graph, node: fx.Node, value: Value, scale: Value) -> Value:
    return replace(value, dtype=_dtype(node), scale=scale.name)


@_lowers(aten.split_with_sizes.default)
def _split(graph: Graph, node: fx.Node, value: Value, sizes: Sequence[int], axis: int = 0) -> list[Value]:
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


@_lowers(aten.unbind.int)
def _unbind(graph: Graph, node: fx.Node, value: Value, axis: int = 0) -> list[Value]:
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


@_lowers(aten.stack.default)
def _stack(graph: Graph, node: fx.Node, values: Sequence[Value], axis: int = 0) -> Value:
    """Lower aten.stack. If the result is only transposed, transpose the inputs instead, which saves a copy."""
    shape = _shape(node)
    axis %= len(shape)
    order = tuple(range(len(shape)))
    readers = [*node.users]
    if len(readers) == 1 and readers[0].target is aten.permute.default:
        order = tuple(place % len(shape) for place in cast(Sequence[int], readers[0].args[1]))
    rest = tuple(place - (place > axis) for place in order if place != axis)
    behind = order.index(axis)
    pieces = []
    for value in values:
        piece = graph.permute(graph.cast(value, _dtype(node)), rest)
        pieces.append(graph.plain(graph.reshape(piece, (*piece.shape[:behind], 1, *piece.shape[behind:]))))
    made = graph.one("Concat", pieces, permute(shape, order), _dtype(node), axis=behind)
    return graph.permute(made, tuple(order.index(place) for place in range(len(order))))


@_lowers(aten.cat.default)
def _cat(graph: Graph, node: fx.Node, values: Sequence[Value], axis: int = 0) -> Value:
    names = [graph.plain(graph.cast(value, _dtype(node))) for value in values if math.prod(value.shape)]
    return graph.one("Concat", names, _shape(node), _dtype(node), axis=axis)


@_lowers(aten.topk.default)
def _topk(
    graph: Graph, node: fx.Node, value: Value, count: int, axis: int = -1, largest: bool = True, in_order: bool = True
) -> list[Value]:
    axis %= len(value.shape)
    shape = (*value.shape[:axis], count, *value.shape[axis + 1 :])
    operands = [graph.plain(value), graph.constant(np.array([count], np.int64))]
    names = graph.node("TopK", operands, shape, shape, axis=axis, largest=int(largest), sorted=int(in_order))
    return [Value(names[0], shape, value.dtype), Value(names[1], shape, torch.int64)]


# --- what a transformer is made of --------------------------------------------------------------------


@_lowers(aten._softmax.default, aten._log_softmax.default)
def _softmax(graph: Graph, node: fx.Node, value: Value, axis: int, half: bool) -> Value:
    kind = "Softmax" if node.target is aten._softmax.default else "LogSoftmax"
    return graph.one(kind, [graph.plain(value)], value.shape, value.dtype, axis=axis % len(value.shape))


@_lowers(aten._softmax_backward_data.default)
def _softmax_backward(graph: Graph, node: fx.Node, grad: Value, result: Value, axis: int, dtype: Any) -> Value:
    """p (g - sum(g p))"""
    shape, kind = result.shape, result.dtype
    weighted = graph.binary("Mul", grad, result, shape, kind)
    total = graph.reduce("ReduceSum", weighted, [axis], keep=True)
    return graph.binary("Mul", graph.binary("Sub", grad, total, shape, kind), result, shape, kind)


@_lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(graph: Graph, node: fx.Node, grad: Value, result: Value, axis: int, dtype: Any) -> Value:
    """g - p sum(g)"""
    shape, kind = result.shape, result.dtype
    total = graph.reduce("ReduceSum", grad, [axis], keep=True)
    spread = graph.binary("Mul", graph.unary("Exp", result), total, shape, kind)
    return graph.binary("Sub", grad, spread, shape, kind)


@_lowers(aten.gelu.default)
def _gelu(graph: Graph, node: fx.Node, value: Value, approximate: str = "none") -> Value:
    return graph.unary("Gelu", value, approximate=approximate)


@_lowers(aten.gelu_backward.default)
def _gelu_backward(graph: Graph, node: fx.Node, grad: Value, value: Value, approximate: str = "none") -> Value:
    """g / 2 (1 + erf t + 2 / sqrt(pi) t exp(-t^2)), t = x / sqrt(2)"""
    if approximate != "none":
        raise Unsupported(f"the gradient of GELU in its {approximate!r} form has no ONNX form here")
    shape, kind = value.shape, value.dtype
    scaled = graph.with_number("Mul", value, math.sqrt(0.5))
    square = graph.binary("Mul", scaled, scaled, shape, kind)
    # divided by the exponential, not multiplied by that of the negative: one pass less; beyond its range 0 as well
    height = graph.with_number("Mul", scaled, 2 / math.sqrt(math.pi))
    bell = graph.binary("Div", height, graph.unary("Exp", square), shape, kind)
    slope = graph.binary("Add", graph.unary("Erf", scaled), bell, shape, kind)
    twice = graph.with_number("Add", slope, 1.0)
    return graph.binary("Mul", graph.with_number("Mul", grad, 0.5), twice, shape, kind)


@_lowers(aten.native_layer_norm.default)
def _layer_norm(
    graph: Graph, node: fx.Node, value: Value, over: Sequence[int], scale: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    return _normalise(graph, value, len(over), scale, bias, eps)


def _normalise(
    graph: Graph, value: Value, axes: int, scale: Value | None, bias: Value | None, eps: float
) -> list[Value]:
    """The normalised values, their means, and one over their standard deviations."""
    over, inner = value.shape[: len(value.shape) - axes], value.shape[len(value.shape) - axes :]
    names = [
        graph.plain(value),
        graph.plain(scale) if scale else graph.constant(np.ones(inner, np.float32)),
        *([graph.plain(bias)] if bias else []),
    ]
    moments = (*over, *(1 for _ in inner))
    made = graph.node("LayerNormalization", names, value.shape, moments, moments, axis=-axes, epsilon=eps)
    return [Value(name, shape, value.dtype) for name, shape in zip(made, (value.shape, moments, moments), strict=True)]


@_lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    graph: Graph,
    node: fx.Node,
    grad: Value,
    value: Value,
    over: Sequence[int],
    mean: Value,
    spread: Value,  # one over the standard deviation
    scale: Value | None,
    bias: Value | None,
    wanted: Sequence[bool],
) -> list[Value | None]:
    """r (g' - mean(g') - n mean(g' n)), g' = g scale, n the normalised values, r one over their deviation"""
    shape, kind = value.shape, value.dtype
    axes = list(range(len(shape) - len(over), len(shape)))
    rows = list(range(len(shape) - len(over)))
    used = {user.args[1] for user in node.users}
    centred = graph.binary("Sub", value, mean, shape, kind)
    normal = graph.binary("Mul", centred, spread, shape, kind)
    results: list[Value | None] = [None, None, None]
    if 0 in used:
        scaled = graph.binary("Mul", grad, scale, shape, kind) if scale else grad
        average = graph.reduce("ReduceMean", scaled, axes, keep=True)
        along = graph.reduce("ReduceMean", graph.binary("Mul", scaled, normal, shape, kind), axes, keep=True)
        part = graph.binary("Add", graph.binary("Mul", normal, along, shape, kind), average, shape, kind)
        results[0] = graph.binary("Mul", graph.binary("Sub", scaled, part, shape, kind), spread, shape, kind)
    if 1 in used:
        results[1] = graph.reduce("ReduceSum", graph.binary("Mul", grad, normal, shape, kind), rows, keep=False)
    if 2 in used:
        results[2] = graph.reduce("ReduceSum", grad, rows, keep=False)
    return results


# --- what a convolutional network is made of ----------------------------------------------------------
# Letters in shapes: B images, I and O channels that enter and leave, H and W rows and columns, K sides of the weight.


@_lowers(aten.convolution.default)
def _convolution(graph: Graph, node: fx.Node, value: Value, weight: Value, bias: Value | None, *form: Any) -> Value:
    stride, padding = _convolution_form(*form)
    operands = [graph.plain(value), graph.plain(weight), *([graph.plain(bias)] if bias else [])]
    return graph.one("Conv", operands, _shape(node), value.dtype, strides=stride, pads=padding + padding)


@_lowers(aten.convolution_backward.default)
def _convolution_backward(
    graph: Graph, node: fx.Node, grad: Value, value: Value, weight: Value, bias_sizes: Any, *form: Any
) -> list[Value | None]:
    """The gradients by the images, the weight and the bias: those that are read."""
    stride, padding = _convolution_form(*form[:-1])
    used = {user.args[1] for user in node.users}
    results: list[Value | None] = [None, None, None]
    if 0 in used:
        results[0] = _image_gradient(graph, grad, weight, value.shape, stride, padding)
    if 1 in used:
        results[1] = _weight_gradient(graph, grad, value, weight.shape, stride, padding)
    if 2 in used:
        results[2] = graph.reduce("ReduceSum", grad, [0, 2, 3], keep=False)
    return results


def _convolution_form(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool, more: Any, groups: int
) -> tuple[list[int], list[int]]:
    """Stride and padding of rows and columns. Raises Unsupported for other than plain convolutions of images."""
    if transposed or groups != 1 or len(stride) != 2 or any(step != 1 for step in dilation):
        raise Unsupported(
            f"a convolution over {len(stride)} axes with groups = {groups}, dilation = {[*dilation]}, transposed = "
            f"{transposed} has no ONNX form here, only plain ones over rows and columns"
        )
    return [*stride], [*padding]


def _image_gradient(
    graph: Graph, grad: Value, weight: Value, shape: Shape, stride: list[int], padding: list[int]
) -> Value:
    """(B, I, H, W): the weights times each gradient (B, O, ...), added up where the convolution read."""
    unread = [  # rows and columns at the end that a stride leaves out
        length + 2 * pad - (places - 1) * step - side
        for length, pad, places, step, side in zip(
            shape[2:], padding, grad.shape[2:], stride, weight.shape[2:], strict=True
        )
    ]
    return graph.one(
        "ConvTranspose", [graph.plain(grad), graph.plain(weight)], shape, grad.dtype,
        strides=stride, pads=padding + padding, output_padding=unread,
    )  # fmt: skip


def _weight_gradient(
    graph: Graph, grad: Value, value: Value, shape: Shape, stride: list[int], padding: list[int]
) -> Value:
    """(O, I, K, K): each gradient (B, O, ...) times what was read there, added up over images and places.

    That is a convolution in which images are what channels are else, and gradients are the weight: a stride lies
    between two of them. If the weight is of one pixel, it is a product, which is several times as fast.
    """
    if shape[2:] == (1, 1) and not any(padding):
        pixels = math.prod(grad.shape[2:])
        read = _every(graph, value, stride, grad.shape[2:])
        left = graph.reshape(grad, (*grad.shape[:2], pixels))
        right = graph.permute(graph.reshape(read, (*read.shape[:2], pixels)), (0, 2, 1))
        return graph.reshape(graph.reduce("ReduceSum", graph.matmul(left, right), [0], keep=False), shape)
    ends = [  # padding at the end, without what a stride leaves out
        (places - 1) * step + side - length - pad
        for places, step, side, length, pad in zip(
            grad.shape[2:], stride, shape[2:], value.shape[2:], padding, strict=True
        )
    ]
    if min(ends) < 0:
        raise Unsupported(f"a convolution whose stride {stride} leaves out rows of an image has no gradient here")
    channels = (1, 0, 2, 3)
    operands = [graph.plain(graph.permute(side, channels)) for side in (value, grad)]
    turned = permute(shape, channels)
    made = graph.one("Conv", operands, turned, grad.dtype, dilations=stride, pads=padding + ends)
    return graph.permute(made, channels)


def _every(graph: Graph, value: Value, stride: list[int], places: Shape) -> Value:
    """Take the rows and columns that a convolution of one pixel reads."""
    if stride == [1, 1]:
        return value
    bounds = [graph.constant(np.array(numbers, np.int64)) for numbers in ([0, 0], value.shape[2:], [2, 3], stride)]
    return graph.one("Slice", [graph.plain(value), *bounds], (*value.shape[:2], *places), value.dtype)


@_lowers(aten.threshold_backward.default)
def _relu_backward(graph: Graph, node: fx.Node, grad: Value, value: Value, threshold: float) -> Value:
    passed = graph.binary("Greater", value, graph.fill(threshold, (), value.dtype), value.shape, torch.bool)
    names = [graph.plain(passed), graph.plain(grad), graph.fill(0.0, (), grad.dtype).name]
    return graph.one("Where", names, value.shape, grad.dtype)


@_lowers(aten.max_pool2d_with_indices.default)
def _max_pool(
    graph: Graph,
    node: fx.Node,
    value: Value,
    sides: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] = (0, 0),
) -> list[Value]:
    """The largest values, and where they lie: in ONNX in the whole tensor, which only the gradient reads."""
    shape = tuple(node.meta["val"][0].shape)
    names = graph.node(
        "MaxPool",
        [graph.plain(value)],
        shape,
        shape,
        kernel_shape=[*sides],
        strides=[*stride],
        pads=[*padding, *padding],
    )
    return [Value(names[0], shape, value.dtype), Value(names[1], shape, torch.int64)]


@_lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(graph: Graph, node: fx.Node, grad: Value, value: Value, *form: Any) -> Value:
    """Added where the largest values were: one of them may be the largest of several places."""
    count, places = math.prod(value.shape), cast(Value, form[-1])
    zeros = graph.constant(np.zeros(count, np.float32))
    flat = [graph.plain(graph.reshape(side, (math.prod(grad.shape),))) for side in (places, grad)]
    made = graph.one("ScatterElements", [zeros, *flat], (count,), grad.dtype, axis=0, reduction="add")
    return graph.reshape(made, value.shape)


# --- helpers ------------------------------------------------------------------------------------------


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def as_constant(graph: Graph, value: torch.Tensor) -> Value:
    array = value.detach().numpy()
    if array.size == 1:
        return graph.fill(array.item(), array.shape, value.dtype)
    return Value(graph.constant(array), array.shape, value.dtype)


def _as_value(graph: Graph, side: Any, dtype: torch.dtype) -> Value:
    return side if isinstance(side, Value) else graph.fill(side, (), dtype)


def _example(side: Any) -> Any:
    return torch.empty(side.shape, dtype=side.dtype, device="meta") if isinstance(side, Value) else side
