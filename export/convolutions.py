"""The operators of convolutional networks."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from export.graph import Shape, Unsupported, Value, permute
from export.products import StepGraph
from export.rules import lowers, shape_of

aten = torch.ops.aten

# Letters in shapes: B images, I and O channels that enter and leave, H and W rows and columns, K sides of the weight.


@lowers(aten.convolution.default)
def _convolution(graph: StepGraph, node: fx.Node, value: Value, weight: Value, bias: Value | None, *form: Any) -> Value:
    stride, padding = _convolution_form(*form)
    operands = [graph.plain(value), graph.plain(weight), *([graph.plain(bias)] if bias else [])]
    return graph.one("Conv", operands, shape_of(node), value.dtype, strides=stride, pads=padding + padding)


@lowers(aten.convolution_backward.default)
def _convolution_backward(
    graph: StepGraph, node: fx.Node, grad: Value, value: Value, weight: Value, bias_sizes: Any, *form: Any
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
            "FV1117",
            f"a convolution over {len(stride)} axes with groups = {groups}, dilation = {[*dilation]}, transposed = "
            f"{transposed} has no ONNX form here, only plain ones over rows and columns",
        )
    return [*stride], [*padding]


def _image_gradient(
    graph: StepGraph, grad: Value, weight: Value, shape: Shape, stride: list[int], padding: list[int]
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
    graph: StepGraph, grad: Value, value: Value, shape: Shape, stride: list[int], padding: list[int]
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
        raise Unsupported(
            "FV1117", f"a convolution whose stride {stride} leaves out rows of an image has no gradient here"
        )
    channels = (1, 0, 2, 3)
    operands = [graph.plain(graph.permute(side, channels)) for side in (value, grad)]
    turned = permute(shape, channels)
    made = graph.one("Conv", operands, turned, grad.dtype, dilations=stride, pads=padding + ends)
    return graph.permute(made, channels)


def _every(graph: StepGraph, value: Value, stride: list[int], places: Shape) -> Value:
    """Take the rows and columns that a convolution of one pixel reads."""
    if stride == [1, 1]:
        return value
    bounds = [graph.constant(np.array(numbers, np.int64)) for numbers in ([0, 0], value.shape[2:], [2, 3], stride)]
    return graph.one("Slice", [graph.plain(value), *bounds], (*value.shape[:2], *places), value.dtype)


@lowers(aten.threshold_backward.default)
def _relu_backward(graph: StepGraph, node: fx.Node, grad: Value, value: Value, threshold: float) -> Value:
    passed = graph.binary("Greater", value, graph.fill(threshold, (), value.dtype), value.shape, torch.bool)
    names = [graph.plain(passed), graph.plain(grad), graph.fill(0.0, (), grad.dtype).name]
    return graph.one("Where", names, value.shape, grad.dtype)


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool(
    graph: StepGraph,
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


@lowers(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(graph: StepGraph, node: fx.Node, grad: Value, value: Value, *form: Any) -> Value:
    """Added where the largest values were: one of them may be the largest of several places."""
    count, places = math.prod(value.shape), cast(Value, form[-1])
    zeros = graph.constant(np.zeros(count, np.float32))
    flat = [graph.plain(graph.reshape(side, (math.prod(grad.shape),))) for side in (places, grad)]
    made = graph.one("ScatterElements", [zeros, *flat], (count,), grad.dtype, axis=0, reduction="add")
    return graph.reshape(made, value.shape)
