"""Transfer rules of the information-flow check: kinds, shape and samples of what each operator of ONNX returns.

A graph may only have the operators that `export` writes; another one is refused, and so is a form that export does not
write. Shapes are computed here, not read from the file: the engine does not rely on those either.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edge_client.trust.kinds import (
    NOTHING,
    Kind,
    Samples,
    Shape,
    Value,
    apply_function,
    attribute,
    broadcast,
    multiply,
    refuse,
    reshape_samples,
    shift,
    sum_samples,
)
from fedvit.onnx_model import FLOAT, INT64, Model, Node, read_integers
from fedvit.protobuf import fields, integers

Inputs = Sequence[Value]
Rule = Callable[["GraphFlow", Node, list[Value]], list[Value]]
RULES: dict[str, Rule] = {}
MAX_AXES = 16
LEAST_MAXIMUM = 16
"""Numbers of which the largest is a statistic of an image, as rounding to integers needs it, and no copy."""
_BYTES = {FLOAT: 4, INT64: 8, 2: 1, 3: 1, 6: 4, 9: 1, 10: 2, 11: 8}
"""Bytes of a number by ONNX's code of its type."""


@dataclass
class GraphFlow:
    """A walk through one graph, from its inputs to its outputs."""

    model: Model
    values: dict[str, Value]  # by name; at first the inputs
    linear: bool = True  # no function of a signal is a signal, also of a single sample
    is_first_step: bool = False  # the first step of a phase is followed
    labels_are_numbers: bool = False  # of a regression: what is left of them is an error
    asks_for_first_step: bool = False
    _constants: dict[str, Value] = field(default_factory=dict)

    def run(self) -> None:
        """Find the value of every node's outputs. Raises NotAllowed."""
        values = self.values
        for node in self.model.nodes:
            rule = RULES.get(node.operator)
            if rule is None:
                raise refuse(f"it has an operator {node.operator[:60]!r} that no method's graph has")
            inputs = [values[name] if name in values else self._read_constant(name) for name in node.inputs]
            results = rule(self, node, inputs)
            if len(node.outputs) > len(results):
                raise refuse(f"operator {node.kind} has {len(node.outputs)} outputs")
            for name, value in zip(node.outputs, results, strict=False):
                if name in values or name in self.model.constants or len(value.shape) > MAX_AXES:
                    raise refuse(f"value {name[:60]!r} is defined twice, or has too many axes")
                values[name] = attribute(value, inputs)

    def _read_constant(self, name: str) -> Value:
        if name == "":
            return _MISSING
        if name not in self._constants:
            if name not in self.model.constants:
                raise refuse(f"a node reads {name[:60]!r} before it is there")
            self._constants[name] = _parse_constant(self.model.constants[name])
        return self._constants[name]

    def integers(self, node: Node, place: int) -> Shape:
        """Return the integers of a constant input. Raises NotAllowed for another value."""
        if place >= len(node.inputs) or node.inputs[place] not in self.model.constants:
            raise refuse(f"operator {node.kind} depends on computed shapes")
        return read_integers(self.model.constants[node.inputs[place]])

    def is_per_sample(self, value: Value) -> bool:
        return value.samples is not None and (self.linear or value.samples.count > 1)


_MISSING = Value((), NOTHING, uniform=True, is_from_server=True)


def _parse_constant(tensor: bytes) -> Value:
    dtype, raw = 0, b""
    for part in fields(tensor):
        if part.number == 2:
            dtype = part.value
        elif part.number == 9:
            raw = part.content
    shape = integers(part for part in fields(tensor) if part.number == 1)
    size = _BYTES.get(dtype, 0)
    if size == 0 or len(raw) != size * math.prod(shape):
        raise refuse("a constant is not written in the form in which export writes it")
    is_zero = raw.count(0) == len(raw)
    uniform = is_zero or raw == raw[:size] * (len(raw) // size)
    return Value(shape, NOTHING if is_zero else Kind.PUBLIC, uniform=uniform, is_from_server=True)


def _rule(*operators: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, rule))
        return rule

    return register


def _union(values: Inputs) -> Kind:
    kinds = NOTHING
    for value in values:
        kinds |= value.kinds
    return kinds


def _are_of_samples(left: Value, right: Value) -> bool:
    return left.samples is not None and right.samples is not None


def _rows(values: Inputs) -> float:
    return min(value.rows for value in values)


def _need(condition: bool, node: Node) -> None:
    if not condition:
        raise refuse(f"operator {node.kind} has a form that no method's graph has")


def _axis(axis: int, shape: Shape, node: Node) -> int:
    _need(-len(shape) <= axis < len(shape), node)
    return axis % len(shape)


# --- elementwise --------------------------------------------------------------------------------------


def _elementwise(values: Inputs, kinds: Kind) -> Value:
    shape, samples = broadcast(values)
    repeated = frozenset(
        axis
        for axis in range(len(shape))
        if all(
            axis < len(shape) - len(value.shape) or value.is_repeated(axis - len(shape) + len(value.shape))
            for value in values
        )
    )
    return Value(shape, kinds, samples, _rows(values), all(value.uniform for value in values), repeated)


@_rule("Identity", "Neg", "Cast")
def _same(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 1, node)
    return [replace(inputs[0], is_first_step=False)]


@_rule("Add", "Sub")
def _add(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 2, node)
    kinds = _union(inputs)
    if flow.labels_are_numbers and node.operator == "Sub" and _is_error(*inputs):
        kinds = Kind.SIGNAL
    return [_elementwise(inputs, kinds)]


def _is_error(output: Value, label: Value) -> bool:
    """Return whether a difference is that of a model's outputs and labels: the error of each sample of a regression.

    As behind a softmax, a bias beside features is then no term by itself.
    """
    if not _are_of_samples(output, label) or label.kinds != Kind.LABEL or not output.kinds & Kind.FEATURE:
        return False
    return not output.kinds & ~(Kind.FEATURE | Kind.PUBLIC | Kind.WEIGHT | Kind.UPDATE | Kind.PERSONAL)


def _scale(left: Value, right: Value, right_kinds: Kind | None = None) -> Value:
    """Return an elementwise product. One number that all share changes the scale of a copy, nothing else."""
    other = right.kinds if right_kinds is None else right_kinds
    kinds = multiply(left.kinds, other, of_samples=_are_of_samples(left, right))
    for value, scaled in ((left, other), (right, left.kinds)):
        if value.size == 1 and value.kinds and value.samples is None:
            kinds |= scaled & (Kind.RAW | Kind.PERSONAL)
    return _elementwise((left, right), kinds)


@_rule("Mul")
def _multiply(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 2, node)
    return [_scale(inputs[0], inputs[1])]


@_rule("Div")
def _divide(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 2, node)
    divisor = apply_function(inputs[1].kinds, per_sample=flow.is_per_sample(inputs[1]))
    return [_scale(inputs[0], inputs[1], divisor)]


@_rule(
    "Sqrt", "Tanh", "Log", "Exp", "Reciprocal", "Relu", "Sigmoid", "Erf", "Gelu", "Clip", "Softmax", "LogSoftmax",
    "Pow", "Mod", "Equal", "Greater", "Less", "Max", "Min",
)  # fmt: skip
def _function(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    result = _elementwise(inputs, _union(inputs))
    kinds = apply_function(result.kinds, per_sample=flow.is_per_sample(result))
    if node.kind in ("Softmax", "LogSoftmax"):
        axis = _axis(node.integer("axis", -1), result.shape, node)
        _need(not (result.samples and result.samples.count > 1 and result.samples.axis == axis), node)
    first = node.kind == "Equal" and "hyper/step" in node.inputs and inputs[1].uniform
    return [replace(result, kinds=kinds, is_first_step=first and _is_one(flow, node))]


def _is_one(flow: GraphFlow, node: Node) -> bool:
    constant = flow.model.constants.get(node.inputs[1])
    if node.inputs[0] != "hyper/step" or constant is None:
        return False
    return any(part.number == 9 and part.content == b"\0\0\x80?" for part in fields(constant))


@_rule("Where")
def _choose(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 3, node)
    condition, *sides = inputs
    if condition.is_first_step:
        flow.asks_for_first_step = True
        sides = sides[:1] if flow.is_first_step else sides[1:]
        return [_elementwise((replace(condition, kinds=Kind.PUBLIC), *inputs[1:]), sides[0].kinds)]
    chosen = apply_function(condition.kinds, per_sample=flow.is_per_sample(condition))
    of_samples = condition.samples is not None and any(side.samples for side in sides)
    return [_elementwise(inputs, multiply(_union(sides), chosen, of_samples=of_samples))]


@_rule("LayerNormalization")
def _normalise(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, *factors = inputs
    axis = _axis(node.integer("axis", -1), value.shape, node)
    _need(
        len(inputs) in (2, 3) and not (value.samples and value.samples.axis >= axis and value.samples.count > 1), node
    )
    function = apply_function(value.kinds, per_sample=flow.is_per_sample(value))
    kinds = multiply(function, factors[0].kinds) | _union(factors[1:])
    shape, _ = broadcast(inputs)
    _need(shape == value.shape, node)
    moments = value.shape[:axis] + (1,) * (len(value.shape) - axis)
    rows = _rows(inputs)
    return [
        Value(shape, kinds, value.samples, rows),
        Value(moments, value.kinds, value.samples, rows),
        Value(moments, function, value.samples, rows),
    ]


@_rule("QuantizeLinear", "DequantizeLinear")
def _round(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, scale = inputs[:2]
    kinds = multiply(value.kinds, apply_function(scale.kinds, per_sample=flow.is_per_sample(scale)))
    if value.samples and value.samples.count > 1 and not scale.samples:
        _need(scale.size == 1, node)
    return [replace(value, kinds=kinds, rows=_rows(inputs), uniform=False, repeated=frozenset())]


# --- shapes -------------------------------------------------------------------------------------------


@_rule("Reshape")
def _reshape(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, shape = inputs[0], flow.integers(node, 1)
    _need(math.prod(shape) == value.size and min(shape, default=1) > 0, node)
    if value.samples is None:
        return [replace(value, shape=shape, repeated=frozenset())]
    if not shape:
        return [Value((), sum_samples(value.kinds), None, min(value.rows, 1))]
    samples = reshape_samples(value.samples, value.shape, shape)
    return [replace(value, shape=shape, samples=samples, repeated=frozenset())]


@_rule("Transpose")
def _transpose(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    [value] = inputs
    order = node.integers("perm") or tuple(reversed(range(len(value.shape))))
    _need(sorted(order) == list(range(len(value.shape))), node)
    samples = value.samples and replace(value.samples, axis=order.index(value.samples.axis))
    repeated = frozenset(order.index(axis) for axis in value.repeated)
    shape = tuple(value.shape[axis] for axis in order)
    return [replace(value, shape=shape, samples=samples, repeated=repeated, pools=False)]


@_rule("Expand")
def _expand(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, shape = inputs[0], flow.integers(node, 1)
    target, samples = broadcast((value, Value(shape, NOTHING, uniform=True)))
    new = len(target) - len(value.shape)
    repeated = {axis + new for axis in range(len(value.shape)) if value.shape[axis] == 1 or axis in value.repeated}
    if samples and samples.count > 1:
        repeated.discard(samples.axis)
    return [replace(value, shape=target, samples=samples, repeated=frozenset(repeated | set(range(new))), pools=False)]


@_rule("ConstantOfShape")
def _fill(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    number = node.attributes.get("value", (0.0,))
    return [Value(flow.integers(node, 0), NOTHING if number == (0,) else Kind.PUBLIC, uniform=True)]


@_rule("Concat")
def _concat(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    axis = _axis(node.integer("axis", 0), inputs[0].shape, node)
    _need(len({value.shape[:axis] + value.shape[axis + 1 :] for value in inputs}) == 1, node)
    _need(len({len(value.shape) for value in inputs}) == 1, node)
    shape = (*inputs[0].shape[:axis], sum(value.shape[axis] for value in inputs), *inputs[0].shape[axis + 1 :])
    # what lies beside the axis is combined as by an elementwise operator
    beside = [replace(value, shape=(*value.shape[:axis], 1, *value.shape[axis + 1 :])) for value in inputs]
    for value in inputs:
        _need(not (value.samples and value.samples.axis == axis and value.samples.count > 1), node)
    _, samples = broadcast(beside)
    if samples and samples.count == 1:
        samples = shift(samples, 0, shape)
    return [Value(shape, _union(inputs), samples, _rows(inputs))]


@_rule("Split")
def _split(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, lengths = inputs[0], flow.integers(node, 1)
    axis = _axis(node.integer("axis", 0), value.shape, node)
    _need(sum(lengths) == value.shape[axis] and min(lengths) >= 0 and len(lengths) == len(node.outputs), node)
    return [_cut(value, axis, 0, length, 1, node) for length in lengths]


@_rule("Slice")
def _slice(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    [value, *_] = inputs
    starts, ends, axes, steps = (flow.integers(node, place) for place in range(1, 5))
    _need(len(starts) == len(ends) == len(axes) == len(steps) and min(steps) > 0, node)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = _axis(axis, value.shape, node)
        length = value.shape[axis]
        begin, stop = (max(0, bound + length if bound < 0 else min(bound, length)) for bound in (start, end))
        _need(begin < stop, node)
        value = _cut(value, axis, begin, -(-(stop - begin) // step), step, node)
    return [value]


def _cut(value: Value, axis: int, begin: int, length: int, step: int, node: Node) -> Value:
    """Return `length` places of an axis. Of samples a part may be taken, such as every other one."""
    samples = value.samples
    shape = (*value.shape[:axis], length, *value.shape[axis + 1 :])
    if samples and samples.axis == axis:
        if samples.count > 1:
            if length < value.shape[axis] and not samples.outer == samples.inner == 1:
                raise refuse(f"operator {node.kind} takes single samples out of a batch")
            samples = replace(samples, count=length if samples.inner == samples.outer == 1 else samples.count)
        else:
            samples = Samples(axis, 1, 1, length)
    return replace(value, shape=shape, samples=samples, pools=False)


@_rule("Gather")
def _gather(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    data, places = inputs
    axis = _axis(node.integer("axis", 0), data.shape, node)
    shape = data.shape[:axis] + places.shape + data.shape[axis + 1 :]
    looks_up = bool(places.kinds & Kind.RAW) and not data.kinds & Kind.RAW  # as an embedding of characters
    of_samples = _are_of_samples(data, places)
    kinds = multiply(data.kinds, places.kinds or Kind.PUBLIC, contracted=looks_up, of_samples=of_samples)
    samples = places.samples and shift(places.samples, axis, shape)
    if data.samples and data.samples.axis == axis and data.samples.count == 1:
        samples = Samples(axis, 1, 1, shape[axis]) if places.shape else None
    elif data.samples:
        _need(data.samples.axis != axis and not (samples and samples.count > 1), node)
        behind = len(places.shape) - 1 if data.samples.axis > axis else 0
        samples = shift(data.samples, behind, shape)
    return [Value(shape, kinds, samples, _rows(inputs))]


@_rule("TopK")
def _top(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, [count] = inputs[0], flow.integers(node, 1)
    axis = _axis(node.integer("axis", -1), value.shape, node)
    _need(not (value.samples and value.samples.axis == axis) and 0 < count <= value.shape[axis], node)
    cut = _cut(value, axis, 0, count, 1, node)
    kinds = apply_function(cut.kinds, per_sample=flow.is_per_sample(cut))
    return [replace(cut, uniform=False, repeated=frozenset()), replace(cut, kinds=kinds, repeated=frozenset())]


# --- sums and products --------------------------------------------------------------------------------


@_rule("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
def _reduce(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value = inputs[0]
    axes = {_axis(axis, value.shape, node) for axis in flow.integers(node, 1)}
    keep = node.integer("keepdims", 1)
    kept = [1 if axis in axes else length for axis, length in enumerate(value.shape)]
    shape = tuple(length for axis, length in enumerate(kept) if keep or axis not in axes)
    kinds, samples, rows = value.kinds, value.samples, value.rows
    if samples and samples.count == 1 and shape:  # a single sample may lie along any axis
        samples = Samples(0, 1, 1, shape[0])
    elif samples and samples.axis in axes:
        _need(node.kind in ("ReduceSum", "ReduceMean"), node)
        rows = min(rows, samples.count)
        kinds, samples = sum_samples(kinds), None
    elif samples and not keep:
        samples = replace(samples, axis=samples.axis - sum(axis < samples.axis for axis in axes))
    if node.kind in ("ReduceMax", "ReduceMin"):
        kinds = apply_function(kinds, per_sample=flow.is_per_sample(value))
        if math.prod(value.shape[axis] for axis in axes) >= LEAST_MAXIMUM and kinds & Kind.RAW:
            kinds = (kinds & ~Kind.RAW) | Kind.LINEAR
    return [Value(shape, kinds, samples, rows, value.uniform)]


_SUMMED = -1
"""In place of an axis of the result: the axis over which a product sums."""


def _product(left: Value, right: Value, shape: Shape, left_axes: Sequence[int], right_axes: Sequence[int]) -> Value:
    """Return a product that sums over one axis of both; `_axes`: axis of each operand -> that of the result."""
    places = []
    for value, axes in ((left, left_axes), (right, right_axes)):
        places.append(None if value.samples is None else axes[value.samples.axis])
    counts = [value.samples.count for value in (left, right) if value.samples]
    rows = min(left.rows, right.rows)
    if set(counts) == {1}:  # a single sample may lie along any axis, and is never summed over
        kinds = multiply(left.kinds, right.kinds, contracted=counts == [1], of_samples=_are_of_samples(left, right))
        return Value(shape, kinds, Samples(0, 1, 1, shape[0]), rows)
    if _SUMMED in places:
        for value, axes, place in ((left, left_axes, places[0]), (right, right_axes, places[1])):
            summed = axes.index(_SUMMED)
            chooses = place is None and not value.is_repeated(summed)
            if max(counts) > 1 and value.kinds and (chooses or place not in (None, _SUMMED)):
                raise refuse("a product weighs the samples of a batch differently")
        found = [value.samples for value in (left, right) if value.samples]
        if max(counts) > 1 and len(found) == 2 and replace(found[0], axis=0) != replace(found[1], axis=0):
            raise refuse("a product combines samples with other samples")
        others = [place for place in places if place not in (None, _SUMMED)]
        kinds = multiply(left.kinds, right.kinds, of_samples=_are_of_samples(left, right))
        if _are_moments(left, right):
            kinds = (kinds & ~Kind.FEATURE) | Kind.UPDATE
        if kinds & Kind.MARKED and not (left.kinds | right.kinds) & Kind.MARKED:
            kinds = (kinds & ~Kind.MARKED) | Kind.LABEL  # a head's gradient has such terms of a local bias
        if others:  # of a single sample
            return Value(shape, kinds, Samples(others[0], 1, 1, shape[others[0]]), rows)
        return Value(shape, sum_samples(kinds), None, min(rows, *counts))
    kinds = multiply(left.kinds, right.kinds, contracted=True, of_samples=_are_of_samples(left, right))
    samples: Samples | None = None
    for value, place in ((left, places[0]), (right, places[1])):
        if value.samples is None or place is None:
            continue
        placed = replace(value.samples, axis=place)
        placed = shift(placed, 0, shape)
        if samples and samples != placed and placed.count > 1:
            raise refuse("a product combines samples with other samples")
        samples = placed
    if samples and samples.count > 1:
        for value, axes in ((left, left_axes), (right, right_axes)):
            differs = samples.axis in axes and not value.is_repeated(list(axes).index(samples.axis))
            if differs and value.kinds and not value.samples:
                raise refuse("a product weighs the samples of a batch differently")
    return Value(shape, kinds, samples, rows)


def _are_moments(left: Value, right: Value) -> bool:
    """Return whether a product over several samples is one of features with features, as a regression sums it.

    It tells no more of a single sample than the sum of features times labels does. Factors that are linear in images
    are not among them: products of those would be sums of pixels times pixels.
    """
    if not (left.samples and right.samples and left.samples.count > 1):
        return False
    both = left.kinds & right.kinds & Kind.FEATURE
    return bool(both) and not (left.kinds | right.kinds) & (Kind.RAW | Kind.LINEAR | Kind.PERSONAL | Kind.MARKED)


@_rule("MatMul")
def _matmul(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    _need(len(inputs) == 2, node)
    return [_matrix_product(inputs[0], inputs[1], node)]


def _matrix_product(left: Value, right: Value, node: Node) -> Value:
    _need(min(len(left.shape), len(right.shape)) >= 2 and left.shape[-1] == right.shape[-2], node)
    front, _ = broadcast((Value(left.shape[:-2] or (1,), NOTHING), Value(right.shape[:-2] or (1,), NOTHING)))
    length = max(len(left.shape), len(right.shape))
    front = front if length > 2 else ()
    shape = (*front, left.shape[-2], right.shape[-1])
    left_axes = [*range(length - len(left.shape), length - 2), length - 2, _SUMMED]
    right_axes = [*range(length - len(right.shape), length - 2), _SUMMED, length - 1]
    return _product(left, right, shape, left_axes, right_axes)


@_rule("Gemm")
def _gemm(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    left, right, *more = inputs
    _need(len(left.shape) == len(right.shape) == 2 and len(more) < 2, node)
    _need(not node.attributes.keys() - {"transA", "transB"}, node)
    turned = [bool(node.integer(name, 0)) for name in ("transA", "transB")]
    left_axes = [_SUMMED, 0] if turned[0] else [0, _SUMMED]
    right_axes = [1, _SUMMED] if turned[1] else [_SUMMED, 1]
    _need(left.shape[left_axes.index(_SUMMED)] == right.shape[right_axes.index(_SUMMED)], node)
    shape = (left.shape[left_axes.index(0)], right.shape[right_axes.index(1)])
    product = _product(left, right, shape, left_axes, right_axes)
    if not more or more[0] is _MISSING:
        return [product]
    result = _elementwise((product, more[0]), product.kinds | more[0].kinds)
    _need(result.shape == shape, node)
    return [result]


@_rule("com.microsoft.MatMulIntegerToFloat")
def _integer_product(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    left, right, *scales = inputs
    known = Kind.PUBLIC | Kind.WEIGHT | Kind.UPDATE | Kind.PERSONAL
    _need(all(not scale.kinds & ~known and not scale.samples and len(scale.shape) <= 1 for scale in scales), node)
    return [_matrix_product(left, right, node)]


@_rule("Conv")
def _convolve(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, weight, *bias = inputs
    strides, pads, dilations = _form(node, value, weight)
    _need(value.shape[1] == weight.shape[1], node)
    sides = tuple(
        (length + pads[axis] + pads[axis + 2] - dilations[axis] * (kernel - 1) - 1) // strides[axis] + 1
        for axis, (length, kernel) in enumerate(zip(value.shape[2:], weight.shape[2:], strict=True))
    )
    _need(min(sides) > 0, node)
    shape = (value.shape[0], weight.shape[0], *sides)
    product = _product(value, weight, shape, [0, _SUMMED, 2, 3], [1, _SUMMED, 2, 3])
    return [replace(product, kinds=product.kinds | _union(bias), rows=_rows((product, *bias)))]


@_rule("ConvTranspose")
def _convolve_back(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    value, weight = inputs
    strides, pads, dilations = _form(node, value, weight)
    more = node.integers("output_padding") or (0, 0)
    _need(value.shape[1] == weight.shape[0] and dilations == (1, 1) and len(more) == 2, node)
    sides = tuple(
        strides[axis] * (length - 1) + more[axis] + kernel - pads[axis] - pads[axis + 2]
        for axis, (length, kernel) in enumerate(zip(value.shape[2:], weight.shape[2:], strict=True))
    )
    _need(min(sides) > 0, node)
    shape = (value.shape[0], weight.shape[1], *sides)
    return [_product(value, weight, shape, [0, _SUMMED, 2, 3], [_SUMMED, 1, 2, 3])]


def _form(node: Node, value: Value, weight: Value) -> tuple[Shape, Shape, Shape]:
    """Return strides, pads and dilations of a convolution over rows and columns, which do not hold samples."""
    _need(len(value.shape) == len(weight.shape) == 4, node)
    _need(not node.attributes.keys() - {"strides", "pads", "dilations", "output_padding", "kernel_shape"}, node)
    for side in (value, weight):
        _need(not (side.samples and side.samples.axis > 1 and side.samples.count > 1), node)
    form = [node.integers(name) or default for name, default in (("strides", (1, 1)), ("pads", (0,) * 4))]
    dilations = node.integers("dilations") or (1, 1)
    _need(len(form[0]) == len(dilations) == 2 and len(form[1]) == 4 and min(form[1]) >= 0 < min(form[0]), node)
    return form[0], form[1], dilations


@_rule("MaxPool")
def _pool(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    [value] = inputs
    _need(len(value.shape) == 4 and not node.attributes.keys() - {"kernel_shape", "strides", "pads"}, node)
    kernel, strides, pads = (node.integers(name) or () for name in ("kernel_shape", "strides", "pads"))
    _need((len(kernel), len(strides), len(pads)) == (2, 2, 4) and min(strides) > 0, node)
    _need(not (value.samples and value.samples.axis > 0 and value.samples.count > 1), node)
    sides = tuple(
        (length + pads[axis] + pads[axis + 2] - kernel[axis]) // strides[axis] + 1
        for axis, length in enumerate(value.shape[2:])
    )
    _need(min(sides) > 0, node)
    shape = (*value.shape[:2], *sides)
    kinds = apply_function(value.kinds, per_sample=flow.is_per_sample(value))
    return [
        Value(shape, kinds, value.samples, value.rows),
        Value(shape, kinds, value.samples, value.rows, pools=True),
    ]


@_rule("ScatterElements")
def _scatter(flow: GraphFlow, node: Node, inputs: list[Value]) -> list[Value]:
    """The gradient of a maximum, put where it was taken from: places are those of `MaxPool`, within each sample."""
    zeros, places, grads = inputs
    _need(not zeros.kinds and places.pools and len(zeros.shape) == 1 and places.shape == grads.shape, node)
    samples = grads.samples
    if samples:
        count = samples.count
        _need(places.samples == samples and samples.outer == 1 and zeros.shape[0] % count == 0, node)
        samples = Samples(0, 1, count, zeros.shape[0] // count)
    kinds = multiply(grads.kinds, apply_function(places.kinds, per_sample=flow.is_per_sample(places)))
    return [Value(zeros.shape, kinds, samples, _rows(inputs))]
