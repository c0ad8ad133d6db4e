"""Operators of the exporter: the absolute value, and its derivative. Devices accept the nodes that they are made of."""

from typing import Any

import torch
from torch import fx

from export.graph import Value
from export.products import StepGraph
from export.rules import Operator

NUMBERS = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


def lower_abs(graph: StepGraph, node: fx.Node, value: Value, **_: Any) -> Value:
    """max(x, 0) + max(-x, 0)"""
    sides = graph.unary("Relu", value), graph.unary("Relu", graph.unary("Neg", value))
    return graph.binary("Add", *sides, value.shape, value.dtype)


def lower_sign(graph: StepGraph, node: fx.Node, value: Value, **_: Any) -> Value:
    """(x > 0) - (x < 0)"""
    zero = graph.fill(0.0, (), value.dtype)
    above, below = (
        graph.cast(graph.binary(kind, value, zero, value.shape, torch.bool), value.dtype)
        for kind in ("Greater", "Less")
    )
    return graph.binary("Sub", above, below, value.shape, value.dtype)


ABS = Operator(lower_abs, torch.abs, (NUMBERS,))
SIGN = Operator(lower_sign, torch.sign, (NUMBERS,))
