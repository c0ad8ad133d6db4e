"""Matrix products of a graph, in the precision that the method chose."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from onnx import TensorProto

from export.graph import DTYPES, GraphBuilder, Value
from fedvit.precision import STEPS_OF_FACTORS, Compute

_ZERO, _STEPS = 128, 127
"""The zero and the largest step, to both sides, of rows that become integers of 8 bits."""
_LEAST_WIDTH = 128
"""The least length of both sides of a trained weight whose products are rounded. Where a side is shorter, as in a head,
rounding the other operand takes as long as the product saves."""
_TINY = 1e-30
"""The least of what a row's scale is made of, which may not be zero."""


class StepGraph(GraphBuilder):
    """A graph whose products with weights have the precision `compute`."""

    def __init__(self, inputs: Mapping[str, Value], compute: Compute) -> None:
        super().__init__(inputs)
        self._compute = compute
        self._integers: dict[str, tuple[str, str]] = {}  # trained weight -> its integers and the scales of its rows
        self._halves: dict[str, str] = {}  # trained weight -> its name as float16
        self.unknown: list[Value] = []  # results of operators outside of ONNX, whose shapes are not inferred

    def gemm(self, left: Value, right: Value, bias: Value | None = None) -> Value:
        """(M, K) x (K, N) + bias, which broadcasts to (M, N)."""
        if self._compute == "int8" and (integers := right if right.scale else self._as_integers(right)):
            return self._integer_product(left, integers, bias)
        if self._compute == "fp16" and (halves := right if right.scale == "" else self._as_halves(right)):
            return self._half_product(left, halves, bias)
        shape = (left.shape[0], right.shape[1])
        flags = {}
        names = []
        for value, flag in ((left, "transA"), (right, "transB")):
            if value.permutation == (1, 0):
                flags[flag] = 1
                names.append(self.plain(replace(value, permutation=None)))
            else:
                names.append(self.plain(value))
        if bias is not None:
            names.append(self.broadcast(bias))
        return self.one("Gemm", names, shape, left.dtype, **flags)

    def _as_integers(self, weight: Value) -> Value | None:
        """A trained weight as int8 with a scale for each row, as packed ones are sent; None for all else.

        Made once for all products of a run, as it is read: a quarter of the weight's bytes until the backward pass.
        """
        if not self._is_trained(weight):
            return None
        if weight.name not in self._integers:
            rows = Value(weight.name, self.shapes[weight.name], weight.dtype)
            [integers], scale = self._round_rows(rows, np.int8(0), STEPS_OF_FACTORS)
            self._integers[weight.name] = integers, self.reshape(scale, (rows.shape[0],)).name
        integers, scales = self._integers[weight.name]
        return replace(weight, name=integers, scale=scales)

    def _is_trained(self, weight: Value) -> bool:
        """Return whether the device trains this weight and it is large enough."""
        given = weight.name.startswith("tensor/") and weight.name in self.inputs and weight.scale is None
        return given and weight.dtype is torch.float32 and min(weight.shape) >= _LEAST_WIDTH

    def _largest_of_rows(self, rows: Value) -> Value:
        """(M, N) -> (M, 1): the largest magnitude in each row, and a little more than 0 for rows of zeros."""
        highest = self.reduce("ReduceMax", rows, [1], keep=True)
        lowest = self.reduce("ReduceMin", rows, [1], keep=True)
        tiny = self.constant(np.array(_TINY, np.float32))
        return self.one("Max", [highest.name, self.unary("Neg", lowest).name, tiny], highest.shape, rows.dtype)

    def _round_rows(self, rows: Value, zero: Any, steps: int) -> tuple[list[str], Value]:
        """A matrix as integers of 8 bits, zero being `zero`, `steps` to both sides; and the scales of its rows."""
        scale = self.with_number("Mul", self._largest_of_rows(rows), 1 / steps)
        zeros = self.constant(np.full(scale.shape, zero))
        block = rows.shape[1]
        return self.node("QuantizeLinear", [rows.name, scale.name, zeros], rows.shape, axis=1, block_size=block), scale

    def _integer_product(self, left: Value, right: Value, bias: Value | None) -> Value:
        """(M, K) float x (K, N) int8, whose scales belong to its columns if it is transposed, else to its rows.

        Each row of `left` becomes integers of 8 bits with a scale of its own, because rows of gradients differ by
        orders of magnitude: what is left out is at most max |row| / 254.
        """
        assert right.scale
        shape, kind = (left.shape[0], right.shape[1]), left.dtype
        operand, scales = right.name, self.constant(np.ones(shape[1], np.float32))
        if right.permutation == (1, 0):
            operand, scales = self.one("Transpose", [operand], right.shape, torch.int8, perm=[1, 0]).name, right.scale
        else:
            by_row = Value(right.scale, (right.shape[0],), kind)
            left = self.binary("Mul", left, by_row, left.shape, kind)
        rows = Value(self.plain(left), left.shape, kind)
        [integers], scale = self._round_rows(rows, np.uint8(_ZERO), _STEPS)
        one, zero = self.constant(np.array(1, np.float32)), self.constant(np.array(_ZERO, np.uint8))
        operands = [integers, operand, one, scales, zero, ""]
        whole = self.one("MatMulIntegerToFloat", operands, shape, kind, domain="com.microsoft")
        self.unknown.append(whole)
        product = self.binary("Mul", whole, scale, shape, kind)
        return self.binary("Add", product, bias, shape, kind) if bias else product

    def _as_halves(self, weight: Value) -> Value | None:
        """A trained weight as float16, made once for all products of a run; None for all else."""
        if not self._is_trained(weight):
            return None
        if weight.name not in self._halves:
            shape = self.shapes[weight.name]
            self._halves[weight.name] = self._as_half(Value(weight.name, shape, weight.dtype)).name
        return replace(weight, name=self._halves[weight.name], scale="")

    def _as_half(self, value: Value) -> Value:
        return self.one("Cast", [self.plain(value)], value.shape, torch.float16, to=TensorProto.FLOAT16)

    def _half_product(self, left: Value, right: Value, bias: Value | None) -> Value:
        """(M, K) float32 x (K, N) float16; onnxruntime's product of them is fast without transposed operands only.

        The product with a weight that is not transposed is a gradient, of which rows are far below what float16 can
        hold: each is divided by its largest number before.
        """
        shape, kind = (left.shape[0], right.shape[1]), left.dtype
        operand, scale = right.name, None
        if right.permutation == (1, 0):
            operand = self.one("Transpose", [operand], right.shape, torch.float16, perm=[1, 0]).name
        else:
            left = Value(self.plain(left), left.shape, kind)
            scale = self._largest_of_rows(left)
            left = self.binary("Div", left, scale, left.shape, kind)
        half = self.one("MatMul", [self._as_half(left).name, operand], shape, torch.float16)
        product = self.one("Cast", [half.name], shape, kind, to=DTYPES[kind])
        if scale:
            product = self.binary("Mul", product, scale, shape, kind)
        return self.binary("Add", product, bias, shape, kind) if bias else product

    def matmul(self, left: Value, right: Value) -> Value:
        shape = (*left.shape[:-1], right.shape[-1])
        return self.one("MatMul", [self.plain(left), self.plain(right)], shape, left.dtype)

    def add_to_product(self, product: Value, other: Value) -> Value | None:
        """Fuse the addition of `other` into a product without other readers; None if that is not possible."""
        node = self.nodes.get(product.name)
        alone = product.permutation is None and not product.repeated
        if node is None or node.op_type != "Gemm" or len(node.input) == 3 or not alone or other.shape != product.shape:
            return None
        added = self.plain(other)
        node.input.append(added)
        if added not in self.inputs:  # then it may have to come after what made `other`
            del self.nodes[product.name]
            self.nodes[product.name] = node
        return product
