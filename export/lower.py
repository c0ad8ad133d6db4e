"""A traced function, operator by operator, as ONNX nodes: few, large, and with every shape known.

Torch's own exporter writes the backward pass of a transformer as hundreds of small operators, which takes
most of a minute. Here each operator of the trace has one function in `LOWERED`, and layouts stay
views as long as possible: a transposed operand is a flag of a product, an addition is fused into a product, and
repeated values are left to broadcasting.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import fx

import fedvit.methods.packed  # noqa: F401 - registers the operator
from fedvit.errors import FedvitError
from fedvit.precision import STEPS_OF_FACTORS

aten = torch.ops.aten
unpack = torch.ops.fedvit.unpack.default

LARGE_BYTES = 1024
"""Constants above are written as what makes them, if they repeat one number."""

_DTYPES: dict[torch.dtype, int] = {
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
"""Of rows that become integers of 8 bits: where zero is, and how far they go to both sides."""
_LEAST_WIDTH = 128
"""The least length of both sides of a trained weight whose products are of integers. Where a side is shorter, as in a
head, rounding the other operand takes as long as the product of integers saves."""
_TINY = 1e-30
"""The least of what a row's scale is made of, which may not be zero."""


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

    def __init__(self, inputs: Mapping[str, Value], integer_products: bool) -> None:
        self._integer_products = integer_products
        self.inputs = dict(inputs)
        self.nodes: dict[str, onnx.NodeProto] = {}  # by first output, in order of execution
        self.shapes: dict[str, Shape] = {value.name: value.shape for value in inputs.values()}
        self.constants: dict[str, onnx.TensorProto] = {}
        self._named: dict[bytes, str] = {}
        self._views: dict[tuple[Any, ...], str] = {}
        self._integers: dict[str, tuple[str, str]] = {}  # trained weight -> its integers and the scales of its rows
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

    def repeated(self, number: float | bool, shape: Shape, dtype: torch.dtype) -> Value:
        """A constant that is one number everywhere."""
        name = self.constant(np.array(number, _numpy(dtype)))
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
                made = self.constant(np.full(value.shape, value.number, _numpy(value.dtype)))
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
            made = self.one("Cast", [value.name], shape, value.dtype, to=_DTYPES[value.dtype])
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
        if value.permutation is not None and value.permutation == _swapped(len(value.shape)) and ends_kept:
            # only the axes in front are regrouped: the view stays one
            behind = Value(value.name, self.shapes[value.name], value.dtype)
            regrouped = self.reshape(behind, (*shape[:-2], shape[-1], shape[-2]))
            return Value(regrouped.name, shape, value.dtype, _swapped(len(shape)))
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
            return self.repeated(_numpy(dtype)(value.number).item(), value.shape, dtype)
        if value.dtype is torch.float16 and value.name in self.inputs:
            return replace(value, dtype=dtype, scale="")
        made = self.one("Cast", [value.name], self.shapes[value.name], dtype, to=_DTYPES[dtype])
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
            number = _CALCULATED[kind](_numpy(left.dtype)(left.number), _numpy(right.dtype)(right.number))
            return self.repeated(number.item(), shape, dtype)
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
        return self.binary(kind, value, self.repeated(number, (), value.dtype), value.shape, value.dtype)

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
        if self._integer_products and (integers := right if right.scale else self._as_integers(right)):
            return self._integer_product(left, integers, bias)
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
        trained = weight.name.startswith("tensor/") and weight.name in self.inputs and weight.scale is None
        if not trained or weight.dtype is not torch.float32 or min(weight.shape) < _LEAST_WIDTH:
            return None
        if weight.name not in self._integers:
            rows = Value(weight.name, self.shapes[weight.name], weight.dtype)
            [integers], scale = self._rounded_rows(rows, np.int8(0), STEPS_OF_FACTORS)
            self._integers[weight.name] = integers, self.reshape(scale, (rows.shape[0],)).name
        integers, scales = self._integers[weight.name]
        return replace(weight, name=integers, scale=scales)

    def _rounded_rows(self, rows: Value, zero: Any, steps: int) -> tuple[list[str], Value]:
        """A matrix as integers of 8 bits, zero being `zero`, `steps` to both sides; and the scales of its rows."""
        kind = rows.dtype
        highest = self.reduce("ReduceMax", rows, [1], keep=True)
        lowest = self.reduce("ReduceMin", rows, [1], keep=True)
        tiny = self.constant(np.array(_TINY, np.float32))
        largest = self.one("Max", [highest.name, self.unary("Neg", lowest).name, tiny], highest.shape, kind)
        scale = self.with_number("Mul", largest, 1 / steps)
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
        [integers], scale = self._rounded_rows(rows, np.uint8(_ZERO), _STEPS)
        one, zero = self.constant(np.array(1, np.float32)), self.constant(np.array(_ZERO, np.uint8))
        operands = [integers, operand, one, scales, zero, ""]
        whole = self.one("MatMulIntegerToFloat", operands, shape, kind, domain="com.microsoft")
        self.unknown.append(whole)
        product = self.binary("Mul", whole, scale, shape, kind)
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


def lower(
    module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str], *, integer_products: bool
) -> onnx.GraphProto:
    """The graph of a trace whose placeholders are `inputs`, in their order, and whose results are called `outputs`.

    `integer_products`: multiply by int8 weights as they are, and round the other operand to int8, with a scale for each
    row.
    Raises Unsupported, naming the operator.
    """
    given = {name: Value(name, tuple(value.shape), value.dtype) for name, value in inputs.items()}
    graph = Graph(given, integer_products)
    found: dict[fx.Node, Any] = {}
    waiting = iter(given.values())

    def looked_up(argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: found[node])

    results: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(waiting)
        elif node.op == "get_attr":
            found[node] = _constant(graph, getattr(module, node.target))
        elif node.op == "call_function":
            if node.target is operator.getitem:
                found[node] = found[node.args[0]][node.args[1]]
                continue
            rule = LOWERED.get(node.target)
            if rule is None:
                raise Unsupported(f"operator {node.target} has no ONNX form here: add it to {__name__}")
            found[node] = rule(graph, node, *looked_up(node.args), **looked_up(node.kwargs))
        else:
            results = [None if value is None else found[value] for value in node.args[0]]
    named = _outputs(graph, results, outputs)
    _drop_unused(graph, named)
    return helper.make_graph(
        _weights_last(graph, {value.name for value in given.values()}),
        "step",
        [helper.make_tensor_value_info(v.name, _DTYPES[v.dtype], v.shape) for v in given.values()],
        [helper.make_tensor_value_info(name, _DTYPES[v.dtype], v.shape) for name, v in named.items()],
        [*graph.constants.values()],
        value_info=[helper.make_tensor_value_info(v.name, _DTYPES[v.dtype], v.shape) for v in graph.unknown],
    )


def _weights_last(graph: Graph, inputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes, those first that follow from tensors of the Program alone, such as unpacked weights.

    onnxruntime works depth first and takes the operand whose node has the higher number before the others: of a
    product first the activations then, and a weight just before it is needed. The other way round it would begin with
    all weights of the model.
    """
    known = {name for name in inputs if name.startswith("tensor/")} | set(graph.constants)
    early: list[onnx.NodeProto] = []
    late: list[onnx.NodeProto] = []
    for node in graph.nodes.values():
        alone = known.issuperset(name for name in node.input if name)
        (early if alone else late).append(node)
        if alone:
            known.update(node.output)
    return early + late


def _outputs(graph: Graph, results: Sequence[Value], names: Sequence[str]) -> dict[str, Value]:
    """Give results their names; an input, a constant or a value that is named already gets a node of its own."""
    renamed: dict[str, str] = {}
    named: dict[str, Value] = {}
    plain = [graph.plain(value) for value in results]
    for name, source, value in zip(names, plain, results, strict=True):
        owner = next((node for node in graph.nodes.values() if source in node.output), None)
        if owner is None or source in renamed or owner.op_type in ("Reshape", "ConstantOfShape"):
            made = graph.nodes.get(graph.node("Identity", [source], value.shape)[0])
            assert made is not None
            made.output[0] = name
        else:
            renamed[source] = name
        named[name] = value
    for node in graph.nodes.values():
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    return named


def _drop_unused(graph: Graph, outputs: Mapping[str, Value]) -> None:
    """Remove nodes, node outputs and constants that nothing reads."""
    needed = set(outputs)
    for key, node in reversed([*graph.nodes.items()]):
        if not needed.intersection(node.output):
            del graph.nodes[key]
            continue
        while node.op_type == "LayerNormalization" and node.output[-1] not in needed:
            del node.output[-1]
        needed.update(node.input)
    graph.constants = {name: value for name, value in graph.constants.items() if name in needed}


# --- operators ----------------------------------------------------------------------------------------

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

_CALCULATED: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "Equal": operator.eq,
    "Greater": operator.gt,
    "Less": operator.lt,
    "Pow": operator.pow,
}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}


def _is_product_for(reader: fx.Node, node: Any) -> bool:
    """Whether `node` is a matrix product that nothing but `reader` sees."""
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
    number = graph.repeated(base, exponent.shape, exponent.dtype)
    return graph.binary("Pow", number, exponent, exponent.shape, exponent.dtype)


@_lowers(aten.clamp.default)
def _clamp(graph: Graph, node: fx.Node, value: Value, low: float | None = None, high: float | None = None) -> Value:
    bounds = ["" if b is None else graph.constant(np.array(b, _numpy(value.dtype))) for b in (low, high)]
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
    return graph.repeated(number, _shape(node), _dtype(node))


@_lowers(aten.arange.start_step)
def _arange(graph: Graph, node: fx.Node, start: int, end: int, step: int = 1, **_: Any) -> Value:
    return _constant(graph, torch.arange(start, end, step, dtype=_dtype(node)))


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
    """Whether what finally happens to a product alone is that its last two axes change places."""
    last, swapped = _shape(node)[-2:], False
    while len(node.users) == 1:
        [node] = node.users
        if node.target is aten.permute.default:
            order = cast(Sequence[int], node.args[1])
            if tuple(axis % len(order) for axis in order) != _swapped(len(order)):
                break
            swapped = not swapped
        else:
            regrouped = node.target in (aten.view.default, aten._unsafe_view.default, aten.clone.default)
            if not regrouped or set(_shape(node)[-2:]) != set(last):
                break
    return swapped


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
    if value.scale and value.permutation is None and axis == 0:  # the pieces stay packed
        lengths = graph.constant(np.array(sizes, np.int64))
        names = graph.node("Split", [value.name, lengths], *shapes, axis=0)
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
    """Of pieces that are permuted as what is made of them will be, if all that is made of them is a permutation."""
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
    made = graph.one("Concat", pieces, _permuted(shape, order), _dtype(node), axis=behind)
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
    return _normalised(graph, value, len(over), scale, bias, eps)


def _normalised(
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


# --- helpers ------------------------------------------------------------------------------------------


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _numpy(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch.")).type


def _swapped(axes: int) -> Shape:
    return (*range(axes - 2), axes - 1, axes - 2)


def _permuted(shape: Shape, order: Shape) -> Shape:
    return tuple(shape[axis] for axis in order)


def _constant(graph: Graph, value: torch.Tensor) -> Value:
    array = value.detach().numpy()
    if array.size == 1:
        return graph.repeated(array.item(), array.shape, value.dtype)
    return Value(graph.constant(array), array.shape, value.dtype)


def _as_value(graph: Graph, side: Any, dtype: torch.dtype) -> Value:
    return side if isinstance(side, Value) else graph.repeated(side, (), dtype)


def _example(side: Any) -> Any:
    return torch.empty(side.shape, dtype=side.dtype, device="meta") if isinstance(side, Value) else side
