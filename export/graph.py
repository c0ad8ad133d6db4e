"""An ONNX graph under construction: values seen through views, and the nodes that they come to.

Layouts stay views as long as possible: a transposed operand is a flag of a product, an addition is fused into a
product, and repeated values are left to broadcasting. What has to lie in memory is written when it is asked for, once.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from fedvit.errors import FedvitError
from fedvit.precision import STEPS_OF_FACTORS, Compute

LARGE_BYTES = 1024
"""Constants above are written as what makes them, if they repeat one number."""

DTYPES: dict[torch.dtype, int] = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.float64: TensorProto.DOUBLE,
    torch.int8: TensorProto.INT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
}
Shape = tuple[int, ...]

_ZERO, _STEPS = 128, 127
"""The zero and the largest step, to both sides, of rows that become integers of 8 bits."""
_LEAST_WIDTH = 128
"""The least length of both sides of a trained weight whose products are rounded. Where a side is shorter, as in a head,
rounding the other operand takes as long as the product saves."""
_TINY = 1e-30
"""The least of what a row's scale is made of, which may not be zero."""


_CALCULATED: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "Less": operator.lt,
    "Pow": operator.pow,
    "Mod": operator.mod,
}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}


@dataclass(frozen=True)
class Value:
    """A tensor of the graph, seen through a view: the tensor named `name`, permuted, or repeated up to `shape`."""

    name: str
    shape: Shape
    dtype: torch.dtype
    permutation: Shape | None = None  # of the named tensor's axes
    repeated: bool = False  # the named tensor's shape broadcasts to `shape`
    number: float | int | bool | None = None  # the one number that a constant repeats
    scale: str | None = None  # the named tensor is int8 or float16 and unpacked where it is read: its scales, or ""


class Unsupported(FedvitError):
    """An operator without an ONNX form here."""


class Graph:
    """An ONNX graph under construction. Names follow from the order of construction alone."""

    def __init__(self, inputs: Mapping[str, Value], compute: Compute) -> None:
        self._compute = compute
        self.inputs = dict(inputs)
        self.nodes: dict[str, onnx.NodeProto] = {}  # by first output, in order of execution
        self.shapes: dict[str, Shape] = {value.name: value.shape for value in inputs.values()}
        self.constants: dict[str, onnx.TensorProto] = {}
        self._named: dict[bytes, str] = {}
        self._views: dict[tuple[Any, ...], str] = {}
        self._integers: dict[str, tuple[str, str]] = {}  # trained weight -> its integers and the scales of its rows
        self._halves: dict[str, str] = {}  # trained weight -> as float16
        self._made = 0
        self.unknown: list[Value] = []  # of operators outside of ONNX, whose shapes are not inferred

    def node(self, kind: str, operands: Sequence[str], *shapes: Shape, **attributes: Any) -> list[str]:
        """Append a node; returns the names of its outputs, one per shape."""
        self._made += 1
        base = f"{kind.lower()}.{self._made}"
        outputs = [base if number == 0 else f"{base}.{number}" for number in range(len(shapes))]
        self.nodes[base] = helper.make_node(kind, list(operands), outputs, name=base, **attributes)
        self.shapes |= dict(zip(outputs, shapes, strict=True))
        return outputs

    def one(self, kind: str, operands: Sequence[str], shape: Shape, dtype: torch.dtype, **attributes: Any) -> Value:
        [name] = self.node(kind, operands, shape, **attributes)
        return Value(name, shape, dtype)

    def constant(self, array: np.ndarray[Any, Any]) -> str:
        """The name of a constant; equal ones share it."""
        array = np.asarray(array)
        key = f"{array.dtype}{array.shape}".encode() + array.tobytes()
        if key not in self._named:
            name = f"constant.{len(self._named)}"
            self._named[key] = name
            if array.nbytes > LARGE_BYTES and (array == array.flat[0]).all():
                shape = self.constant(np.array(array.shape, np.int64))
                number = numpy_helper.from_array(array.reshape(-1)[:1])
                self.nodes[name] = helper.make_node("ConstantOfShape", [shape], [name], name=name, value=number)
            else:
                self.constants[name] = numpy_helper.from_array(array, name)
            self.shapes[name] = array.shape
        return self._named[key]

    def fill(self, number: float | bool, shape: Shape, dtype: torch.dtype) -> Value:
        """A constant that is one number everywhere."""
        name = self.constant(np.array(number, number_type(dtype)))
        return Value(name, shape, dtype, repeated=True, number=number)

    def plain(self, value: Value) -> str:
        """The name of a tensor that holds the value as it is seen; made once per view."""
        if value.scale is not None:
            value = self._unpack(value)
        if value.permutation is None and not value.repeated:
            return value.name
        key = (value.name, value.shape, value.permutation)
        if key not in self._views:
            if value.permutation is not None:
                made = self.one("Transpose", [value.name], value.shape, value.dtype, perm=list(value.permutation)).name
            elif value.number is not None:
                made = self.constant(np.full(value.shape, value.number, number_type(value.dtype)))
            else:
                shape = self.constant(np.array(value.shape, np.int64))
                made = self.one("Expand", [value.name, shape], value.shape, value.dtype).name
            self._views[key] = made
        return self._views[key]

    def _unpack(self, value: Value) -> Value:
        """Repeated for every reader, so that a large matrix does not stay in memory until the backward pass."""
        shape = self.shapes[value.name]
        if value.scale:
            made = self.one("DequantizeLinear", [value.name, value.scale], shape, value.dtype, axis=0)
        else:
            made = self.one("Cast", [value.name], shape, value.dtype, to=DTYPES[value.dtype])
        return replace(value, name=made.name, scale=None)

    def broadcast(self, value: Value) -> str:
        """A name for an operator that broadcasts by itself."""
        return value.name if value.repeated else self.plain(value)

    # --- views ----------------------------------------------------------------------------------------

    def reshape(self, value: Value, shape: Shape) -> Value:
        if shape == value.shape:
            return value
        if value.number is not None:
            return replace(value, shape=shape)
        ends_kept = len(shape) >= 2 and shape[-2:] == value.shape[-2:]
        if value.permutation is not None and value.permutation == swap_last_axes(len(value.shape)) and ends_kept:
            # only the axes in front are regrouped: the view stays one
            behind = Value(value.name, self.shapes[value.name], value.dtype)
            regrouped = self.reshape(behind, (*shape[:-2], shape[-1], shape[-2]))
            return Value(regrouped.name, shape, value.dtype, swap_last_axes(len(shape)))
        source = self.plain(value)
        while source in self.nodes and self.nodes[source].op_type == "Reshape":
            source = self.nodes[source].input[0]
        if self.shapes[source] == shape:
            return Value(source, shape, value.dtype)
        key = (source, shape, "reshape")
        if key not in self._views:
            lengths = self.constant(np.array(shape, np.int64))
            self._views[key] = self.one("Reshape", [source, lengths], shape, value.dtype).name
        return Value(self._views[key], shape, value.dtype)

    def permute(self, value: Value, order: Shape) -> Value:
        shape = tuple(value.shape[axis] for axis in order)
        if value.number is not None:
            return replace(value, shape=shape)
        if value.repeated:
            value = Value(self.plain(value), value.shape, value.dtype)
        before = value.permutation or tuple(range(len(order)))
        composed = tuple(before[axis] for axis in order)
        return replace(value, shape=shape, permutation=None if composed == tuple(range(len(order))) else composed)

    def expand(self, value: Value, shape: Shape) -> Value:
        if shape == value.shape:
            return value
        if value.repeated:
            return replace(value, shape=shape)
        return Value(self.plain(value), shape, value.dtype, repeated=True)

    # --- arithmetic -----------------------------------------------------------------------------------

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        if value.number is not None:
            return self.fill(number_type(dtype)(value.number).item(), value.shape, dtype)
        if value.dtype is torch.float16 and value.name in self.inputs:
            return replace(value, dtype=dtype, scale="")
        made = self.one("Cast", [value.name], self.shapes[value.name], dtype, to=DTYPES[dtype])
        return replace(value, name=made.name, dtype=dtype)

    def unary(self, kind: str, value: Value, **attributes: Any) -> Value:
        """An elementwise operator works on what lies behind a view."""
        if value.scale is not None:
            value = self._unpack(value)
        [name] = self.node(kind, [value.name], self.shapes[value.name], **attributes)
        return replace(value, name=name, number=None)

    def binary(self, kind: str, left: Value, right: Value, shape: Shape, dtype: torch.dtype) -> Value:
        """An elementwise operator on two values, of which one may be a view of the same kind as the other."""
        left, right = (self._unpack(side) if side.scale is not None else side for side in (left, right))
        if left.number is not None and right.number is not None:
            number = _CALCULATED[kind](number_type(left.dtype)(left.number), number_type(right.dtype)(right.number))
            return self.fill(number.item(), shape, dtype)
        if dtype.is_floating_point:
            if left.shape == shape and right.number is not None and right.number == _NEUTRAL.get(kind):
                return left
            commutes = kind in ("Add", "Mul")
            if commutes and right.shape == shape and left.number is not None and left.number == _NEUTRAL[kind]:
                return right
        if (view := self._shared_view(left, right, shape)) is not None:
            behind = tuple(shape[view.index(axis)] for axis in range(len(shape)))
            made = self.one(kind, [left.name, right.name], behind, dtype)
            return Value(made.name, shape, dtype, view)
        names = [self.broadcast(value) for value in (left, right)]
        covered = tuple(np.broadcast_shapes(*(self.shapes[name] for name in names)))
        made = self.one(kind, names, covered, dtype)
        return made if covered == shape else Value(made.name, shape, dtype, repeated=True)

    def _shared_view(self, left: Value, right: Value, shape: Shape) -> Shape | None:
        """The permutation through which both are seen, where there is one; numbers look the same through any.

        `shape` is the result's: none of the two may have to be repeated for it.
        """
        views = {value.permutation for value in (left, right) if self.shapes[value.name] != ()}
        shapes = {value.shape for value in (left, right) if self.shapes[value.name] != ()}
        return views.pop() if len(views) == 1 and shapes == {shape} else None

    def with_number(self, kind: str, value: Value, number: float) -> Value:
        return self.binary(kind, value, self.fill(number, (), value.dtype), value.shape, value.dtype)

    def reduce(self, kind: str, value: Value, axes: Sequence[int], keep: bool) -> Value:
        axes = sorted(axis % max(len(value.shape), 1) for axis in axes)
        kept = tuple(1 if axis in axes else length for axis, length in enumerate(value.shape))
        shape = kept if keep else tuple(length for axis, length in enumerate(value.shape) if axis not in axes)
        if not axes or math.prod(value.shape[axis] for axis in axes) == 1:
            return self.reshape(value, shape)
        operands = [self.plain(value), self.constant(np.array(axes, np.int64))]
        return self.one(kind, operands, shape, value.dtype, keepdims=int(keep))

    # --- products -------------------------------------------------------------------------------------

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


def number_type(dtype: torch.dtype) -> Any:
    """numpy's type of one number."""
    return np.dtype(str(dtype).removeprefix("torch.")).type


def swap_last_axes(axes: int) -> Shape:
    """The order of `axes` axes in which the last two have changed places."""
    return (*range(axes - 2), axes - 1, axes - 2)


def permute(shape: Shape, order: Shape) -> Shape:
    """`shape` with its axes in this order."""
    return tuple(shape[axis] for axis in order)
