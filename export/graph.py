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


class GraphBuilder:
    """An ONNX graph under construction. Names follow from the order of construction alone."""

    def __init__(self, inputs: Mapping[str, Value]) -> None:
        self.inputs = dict(inputs)
        self.nodes: dict[str, onnx.NodeProto] = {}  # by first output, in order of execution
        self.shapes: dict[str, Shape] = {value.name: value.shape for value in inputs.values()}
        self.constants: dict[str, onnx.TensorProto] = {}
        self._named: dict[bytes, str] = {}
        self._views: dict[tuple[Any, ...], str] = {}
        self._made = 0

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


def number_type(dtype: torch.dtype) -> Any:
    """numpy's type of one number."""
    return np.dtype(str(dtype).removeprefix("torch.")).type


def swap_last_axes(axes: int) -> Shape:
    """The order of `axes` axes in which the last two have changed places."""
    return (*range(axes - 2), axes - 1, axes - 2)


def permute(shape: Shape, order: Shape) -> Shape:
    """`shape` with its axes in this order."""
    return tuple(shape[axis] for axis in order)
