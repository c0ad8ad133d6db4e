"""The operators of transformers: softmax, GELU and LayerNorm, with their gradients."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from export.graph import Unsupported, Value
from export.products import StepGraph
from export.rules import lowers

aten = torch.ops.aten


@lowers(aten._softmax.default, aten._log_softmax.default)
def _softmax(graph: StepGraph, node: fx.Node, value: Value, axis: int, half: bool) -> Value:
    kind = "Softmax" if node.target is aten._softmax.default else "LogSoftmax"
    return graph.one(kind, [graph.plain(value)], value.shape, value.dtype, axis=axis % len(value.shape))


@lowers(aten._softmax_backward_data.default)
def _softmax_backward(graph: StepGraph, node: fx.Node, grad: Value, result: Value, axis: int, dtype: Any) -> Value:
    """p (g - sum(g p))"""
    shape, kind = result.shape, result.dtype
    weighted = graph.binary("Mul", grad, result, shape, kind)
    total = graph.reduce("ReduceSum", weighted, [axis], keep=True)
    return graph.binary("Mul", graph.binary("Sub", grad, total, shape, kind), result, shape, kind)


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(graph: StepGraph, node: fx.Node, grad: Value, result: Value, axis: int, dtype: Any) -> Value:
    """g - p sum(g)"""
    shape, kind = result.shape, result.dtype
    total = graph.reduce("ReduceSum", grad, [axis], keep=True)
    spread = graph.binary("Mul", graph.unary("Exp", result), total, shape, kind)
    return graph.binary("Sub", grad, spread, shape, kind)


@lowers(aten.gelu.default)
def _gelu(graph: StepGraph, node: fx.Node, value: Value, approximate: str = "none") -> Value:
    return graph.unary("Gelu", value, approximate=approximate)


@lowers(aten.gelu_backward.default)
def _gelu_backward(graph: StepGraph, node: fx.Node, grad: Value, value: Value, approximate: str = "none") -> Value:
    """g / 2 (1 + erf t + 2 / sqrt(pi) t exp(-t^2)), t = x / sqrt(2)"""
    if approximate != "none":
        raise Unsupported("FV1117", f"the gradient of GELU in its {approximate!r} form has no ONNX form here")
    shape, kind = value.shape, value.dtype
    scaled = graph.with_number("Mul", value, math.sqrt(0.5))
    square = graph.binary("Mul", scaled, scaled, shape, kind)
    # divided by the exponential, not multiplied by that of the negative: one pass less; beyond its range 0 as well
    height = graph.with_number("Mul", scaled, 2 / math.sqrt(math.pi))
    bell = graph.binary("Div", height, graph.unary("Exp", square), shape, kind)
    slope = graph.binary("Add", graph.unary("Erf", scaled), bell, shape, kind)
    twice = graph.with_number("Add", slope, 1.0)
    return graph.binary("Mul", graph.with_number("Mul", grad, 0.5), twice, shape, kind)


@lowers(aten.native_layer_norm.default)
def _layer_norm(
    graph: StepGraph,
    node: fx.Node,
    value: Value,
    over: Sequence[int],
    scale: Value | None,
    bias: Value | None,
    eps: float,
) -> list[Value]:
    return _normalise(graph, value, len(over), scale, bias, eps)


def _normalise(
    graph: StepGraph, value: Value, axes: int, scale: Value | None, bias: Value | None, eps: float
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


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    graph: StepGraph,
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
