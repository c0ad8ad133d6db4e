"""Optional operators of our own, for what onnxruntime computes in many passes, or slowly: attention, LayerNorm, gradients
of these and of GELU, sums of columns, rounding around products of integers, and gradients of weights in bfloat16.

They are in a package of their own, `fedvit[kernels]`. Graphs that are sent never contain them: where the package is
installed, a device replaces nodes of the graph that it was sent, just before it opens it. Nodes are replaced only
if nothing else reads what is computed inside of them, and if all of their shapes and numbers are those of the pattern.
"""

import ctypes
import functools
import importlib
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedvit.protobuf import Field, bytes_field, fields, integers, number_field

PACKAGE = "fedvit_kernels"
EXTRA = "fedvit[kernels]"
DOMAIN = "fedvit.kernels"

_GRAPH, _OPSETS = 7, 8  # fields of a model
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _BETWEEN = 1, 5, 11, 12, 13  # of a graph
_FLOAT, _BYTES, _INTEGER = 1, (2, 3), 7  # types of a tensor
_INTEGER_PRODUCT = "MatMulIntegerToFloat of com.microsoft"
_REPEATED = "ConstantOfShape"
_LEAST_SIDE = 32
"""Of a weight whose gradient is worth other products than the engine's own."""

Numbers = tuple[float, ...]


@functools.cache
def library() -> Path | None:
    """The library with the operators, if it is installed."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return None
    place: Path = package.LIBRARY
    return place


@functools.cache
def multiplies_bfloat16(path: Path) -> bool:
    """Whether the library says that this processor has products of bfloat16. Raises OSError if it cannot be loaded."""
    return bool(ctypes.CDLL(str(path)).fedvit_multiplies_bfloat16())


# --- a graph's nodes ----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Node:
    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Numbers]  # of numbers alone
    encoded: bytes
    place: int


@dataclass
class _Nodes:
    """Nodes in their order, and who makes and who reads a tensor."""

    all: list[_Node]
    constants: dict[str, Numbers]
    kept: set[str]  # outputs of the graph
    described: dict[str, bytes]  # type and shape of other tensors
    makers: dict[str, _Node] = field(default_factory=dict)
    readers: dict[str, list[_Node]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for node in self.all:
            self.makers |= dict.fromkeys(node.outputs, node)
            if node.kind == _REPEATED:
                self.constants |= dict.fromkeys(node.outputs, node.attributes["value"])
            for name in node.inputs:
                self.readers[name].append(node)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """What the graph says of a tensor that is no constant; None if it says nothing."""
        content = self.described.get(name, b"")
        for number in (2, 1, 2):  # type, of a tensor, shape
            content = next((part.content for part in fields(content) if part.number == number), b"")
        lengths = [part for axis in fields(content) for part in fields(axis.content) if part.number == 1]
        return tuple(part.value for part in lengths) if content else None


def _node(entry: Field, place: int) -> _Node:
    kind, inputs, outputs, attributes = "", list[str](), list[str](), dict[str, Numbers]()
    for part in fields(entry.content):
        if part.number == 1:
            inputs.append(part.text)
        elif part.number == 2:
            outputs.append(part.text)
        elif part.number == 4:
            kind = part.text + kind
        elif part.number == 5:
            attributes |= [_attribute(part.content)]
        elif part.number == 7 and part.text:
            kind = f"{kind} of {part.text}"  # like none of the patterns
    return _Node(kind, inputs, outputs, attributes, entry.content, place)


def _attribute(content: bytes) -> tuple[str, Numbers]:
    name, numbers, tensor = "", list[Field](), None
    for part in fields(content):
        if part.number == 1:
            name = part.text
        elif part.number == 2:
            return name, struct.unpack("<f", part.content)
        elif part.number == 5:
            tensor = _constant(part.content)
        elif part.number in (3, 8):
            numbers.append(part)
    return name, tensor[1] if tensor else integers(numbers)


def _constant(content: bytes) -> tuple[str, Numbers] | None:
    """Name and numbers of a small tensor of floats or whole numbers, as export writes it; of bytes that are all equal
    one of them.
    """
    kind, name, raw = 0, "", b""
    for part in fields(content):
        if part.number == 2:
            kind = part.value
        elif part.number == 8:
            name = part.text
        elif part.number == 9:
            raw = part.content
    if kind in _BYTES and len(set(raw)) == 1:
        return name, (raw[0],)
    form = {_FLOAT: "f", _INTEGER: "q"}.get(kind)
    if form is None or len(raw) % struct.calcsize(form) or len(raw) > 64:
        return None
    return name, struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw)


# --- patterns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Numbers]


def _pattern(text: str) -> tuple[_Step, ...]:
    """Lines `results = Kind operands [name:1,2]`. `#name` is a constant, which is looked at afterwards."""
    steps = []
    for line in text.strip().splitlines():
        results, _, call = line.partition("=")
        kind, *operands = call.split()
        given = dict(operand.split(":") for operand in operands if ":" in operand)
        attributes = {name: tuple(float(number) for number in numbers.split(",")) for name, numbers in given.items()}
        steps.append(_Step(kind, tuple(o for o in operands if ":" not in o), tuple(results.split()), attributes))
    return tuple(steps)


_GELU_GRAD = _pattern("""
    t = Mul x #root
    tt = Mul t t
    h = Mul t #height
    e = Exp tt
    d = Div h e
    f = Erf t
    a = Add f d
    s = Add a #one
    w = Mul g #half
    y = Mul w s
""")
_LAYER_NORM_GRAD = _pattern("""
    c = Sub x m
    n = Mul c r
    s = Mul g w
    a = ReduceMean s #axes keepdims:1
    p = Mul s n
    l = ReduceMean p #axes keepdims:1
    i = Mul n l
    j = Add i a
    k = Sub s j
    y = Mul k r
""")
_NORM_SUMS = _pattern("""
    v = Mul g n
    dw = ReduceSum v #rows keepdims:0
""")
_BIAS_SUMS = _pattern("""
    db = ReduceSum g #rows keepdims:0
""")
_ATTENTION = _pattern("""
    q0 k0 v0 = Split z #ones axis:2
    q1 = Reshape q0 #bnhw
    k1 = Reshape k0 #bnhw
    v1 = Reshape v0 #bnhw
    q2 = Mul q1 #scale
    q3 = Transpose q2 perm:0,2,1,3
    q = Reshape q3 #anw
    k3 = Transpose k1 perm:0,2,3,1
    k = Reshape k3 #awn
    s0 = MatMul q k
    s1 = Reshape s0 #bhnn
    p = Softmax s1 axis:3
    p1 = Reshape p #ann
    v3 = Transpose v1 perm:0,2,1,3
    v = Reshape v3 #anw
    o0 = MatMul p1 v
    o1 = Reshape o0 #bhnw
    o = Transpose o1 perm:0,2,1,3
""")
_ATTENTION_GRAD = _pattern("""
    g1 = Transpose g perm:0,2,1,3
    g2 = Reshape g1 #anw
    pt = Transpose p1 perm:0,2,1
    dv0 = MatMul pt g2
    vt = Transpose v perm:0,2,1
    dp0 = MatMul g2 vt
    dv1 = Reshape dv0 #bhnw
    dp = Reshape dp0 #bhnn
    w = Mul dp p
    b = ReduceSum w #last keepdims:1
    c = Sub dp b
    ds = Mul c p
    d = Reshape ds #ann
    dt = Transpose d perm:0,2,1
    dk0 = MatMul dt q
    kt = Transpose k perm:0,2,1
    dq0 = MatMul d kt
    dk1 = Reshape dk0 #bhnw
    dq1 = Reshape dq0 #bhnw
    dq2 = Mul dq1 #scale
    dq3 = Transpose dq2 perm:0,2,1,3
    dq4 = Reshape dq3 #bn1hw
    dk3 = Transpose dk1 perm:0,2,1,3
    dk4 = Reshape dk3 #bn1hw
    dv3 = Transpose dv1 perm:0,2,1,3
    dv4 = Reshape dv3 #bn1hw
    y = Concat dq4 dk4 dv4 axis:2
""")
_ROUND_ROWS = _pattern("""
    hi = ReduceMax x #last keepdims:1
    lo = ReduceMin x #last keepdims:1
    d = Neg lo
    m = Max hi d #tiny
    s = Mul m #step
    y = QuantizeLinear x s #zero axis:1
""")


@dataclass
class _Match:
    """Which tensors and nodes stand for those of a pattern."""

    names: dict[str, str]
    nodes: set[_Node]

    def extended(self, nodes: _Nodes, pattern: Sequence[_Step], last: _Node) -> "_Match | None":
        """This match and that of a pattern whose last step is `last`; None if it is another computation."""
        made_by = {result: step for step in pattern for result in step.outputs}
        match = _Match(dict(self.names), set(self.nodes))
        waiting = [(pattern[-1], last)]
        seen: set[int] = set()
        while waiting:
            step, node = waiting.pop()
            if id(step) in seen:
                continue
            seen.add(id(step))
            sizes_differ = len(node.inputs) != len(step.inputs) or len(node.outputs) != len(step.outputs)
            if node.kind != step.kind or sizes_differ:
                return None
            if any(node.attributes.get(name) != numbers for name, numbers in step.attributes.items()):
                return None
            called = (*step.inputs, *step.outputs)
            for name, here in zip(called, (*node.inputs, *node.outputs), strict=True):
                if name.startswith("#"):
                    if here not in nodes.constants:
                        return None
                    # equal constants may have several names
                    if nodes.constants[match.names.setdefault(name, here)] != nodes.constants[here]:
                        return None
                elif match.names.setdefault(name, here) != here:
                    return None
            match.nodes.add(node)
            for name, here in zip(step.inputs, node.inputs, strict=True):
                if name in made_by:
                    if here not in nodes.makers:
                        return None
                    waiting.append((made_by[name], nodes.makers[here]))
        return match

    def closed(self, nodes: _Nodes, *results: str) -> bool:
        """Whether nothing outside reads what is inside, but `results` of the pattern."""
        shown = {self.names[name] for name in results}
        inside = {name for node in self.nodes for name in node.outputs} - shown
        return not inside & nodes.kept and all(self.nodes.issuperset(nodes.readers[name]) for name in inside)

    def has(self, nodes: _Nodes, **numbers: Sequence[float]) -> bool:
        """Whether constants of the pattern have these numbers, as far as it has them."""
        return all(
            self._near(nodes.constants[self.names[f"#{name}"]], wanted)
            for name, wanted in numbers.items()
            if f"#{name}" in self.names
        )

    def _near(self, found: Numbers, wanted: Sequence[float]) -> bool:
        return len(found) == len(wanted) and all(
            math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, wanted, strict=True)
        )


@dataclass(frozen=True)
class _Call:
    """A node with an operator of ours, in place of the matched ones."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    replaced: frozenset[_Node]
    place: int  # of the node in whose place it stands
    number: tuple[str, float] | None = None  # an attribute

    def encoded(self) -> bytes:
        parts = [bytes_field(1, name) for name in self.inputs]
        parts += [bytes_field(2, name) for name in self.outputs]
        parts += [bytes_field(3, f"{self.kind}/{self.outputs[0]}"), bytes_field(4, self.kind)]
        if self.number:  # name, number, type: a float
            name, number = self.number
            parts.append(bytes_field(5, bytes_field(1, name) + b"\x15" + struct.pack("<f", number) + number_field(20, 1)))
        return b"".join((*parts, bytes_field(7, DOMAIN)))


def _gelu_grads(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        match = _Match({}, set()).extended(nodes, _GELU_GRAD, node) if node.kind == "Mul" else None
        height, root = 2 / math.sqrt(math.pi), math.sqrt(0.5)
        if match and match.closed(nodes, "y") and match.has(nodes, root=[root], height=[height], one=[1], half=[0.5]):
            reads = (match.names["g"], match.names["x"])
            yield _Call("GeluGrad", reads, (match.names["y"],), frozenset(match.nodes), node.place)


def _layer_norm_grads(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        match = _Match({}, set()).extended(nodes, _LAYER_NORM_GRAD, node) if node.kind == "Mul" else None
        if match is None:
            continue
        names = match.names
        norm = nodes.makers.get(names["m"])
        if norm is None or norm.kind != "LayerNormalization" or norm.attributes.get("axis") != (-1,):
            continue
        axes = nodes.constants[names["#axes"]]
        if norm.outputs[1:] != [names["m"], names["r"]] or norm.inputs[0] != names["x"] or len(axes) != 1:
            continue
        shown = ["y"]
        for pattern, of in ((_NORM_SUMS, "n"), (_BIAS_SUMS, "g")):
            ends = (last for reader in nodes.readers[names[of]] for last in _ends(nodes, reader))
            found = (match.extended(nodes, pattern, last) for last in ends)
            rows = [float(axis) for axis in range(int(axes[0]))]
            for more in found:
                if more and more.has(nodes, rows=rows):
                    match, result = more, pattern[-1].outputs[0]
                    shown.append(result)
                    break
        if not match.closed(nodes, *shown):
            continue
        made = tuple(match.names.get(result, f"{node.outputs[0]}/{result}") for result in ("y", "dw", "db"))
        reads = tuple(match.names[name] for name in ("g", "x", "m", "r", "w"))
        # before the first that reads one of the three; what it reads is there when the scaled gradient is
        place = max(nodes.makers[match.names[name]].place for name in ("s", "c"))
        yield _Call("LayerNormGrad", reads, made, frozenset(match.nodes), place)


def _ends(nodes: _Nodes, reader: _Node) -> list[_Node]:
    """A node that reads, and those that read what it makes."""
    return [reader, *(after for name in reader.outputs for after in nodes.readers[name])]


def _attentions(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        match = _Match({}, set()).extended(nodes, _ATTENTION, node) if node.kind == "Transpose" else None
        if match is None or not _is_attention(nodes, match):
            continue
        scale = ("scale", nodes.constants[match.names["#scale"]][0])
        reads = (match.names["z"],)
        ends = (last for last in _behind(nodes, match.names["q"], depth=6) if last.kind == "Concat")
        found = [more for last in ends if (more := match.extended(nodes, _ATTENTION_GRAD, last))]
        both = found[0] if len(found) == 1 and _is_attention(nodes, found[0]) else None
        if both and both.closed(nodes, "o", "y"):
            gradient = both.nodes - match.nodes
            made, left = (both.names["y"],), (both.names["g"],)
            last = nodes.makers[both.names["y"]]
            yield _Call("Attention", reads, tuple(node.outputs), frozenset(match.nodes), node.place, scale)
            yield _Call("AttentionGrad", reads + left, made, frozenset(gradient), last.place, scale)
        elif match.closed(nodes, "o"):
            yield _Call("Attention", reads, tuple(node.outputs), frozenset(match.nodes), node.place, scale)


def _behind(nodes: _Nodes, name: str, depth: int) -> list[_Node]:
    """The nodes that depend on a tensor, by a path of at most `depth` nodes."""
    reached: dict[_Node, None] = {}
    names = [name]
    for _ in range(depth):
        after = [node for name in names for node in nodes.readers[name] if node not in reached]
        reached |= dict.fromkeys(after)
        names = [name for node in after for name in node.outputs]
    return list(reached)


def _is_attention(nodes: _Nodes, match: _Match) -> bool:
    """Whether all lengths are those of heads side by side."""
    lengths = nodes.constants[match.names["#bnhw"]]  # of one of three pieces
    if len(lengths) != 4 or len(nodes.constants[match.names["#scale"]]) != 1:
        return False
    b, n, h, w = lengths
    shapes: dict[str, Sequence[float]] = {"anw": [b * h, n, w], "awn": [b * h, w, n], "ann": [b * h, n, n]}
    shapes |= {"bhnn": [b, h, n, n], "bhnw": [b, h, n, w], "bn1hw": [b, n, 1, h, w], "ones": [1, 1, 1], "last": [3]}
    return match.has(nodes, **shapes)


def _rounded_rows(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        match = _Match({}, set()).extended(nodes, _ROUND_ROWS, node) if node.kind == "QuantizeLinear" else None
        if match is None or not match.closed(nodes, "s", "y") or not match.has(nodes, last=[1], tiny=[1e-30]):
            continue
        rows, scales = match.names["x"], match.names["s"]
        shape = nodes.shape(rows)
        if shape is None or len(shape) != 2 or node.attributes.get("block_size") != (shape[1],):
            continue
        made = (node.outputs[0], scales)
        if match.has(nodes, step=[1 / 64], zero=[0]):
            yield _Call("RoundWeights", (rows,), made, frozenset(match.nodes), node.place)
        elif match.has(nodes, step=[1 / 127], zero=[128]):
            reads, gone = [rows], match.nodes
            scaled = nodes.makers.get(rows)
            if scaled and scaled.kind == "Mul" and gone.issuperset(nodes.readers[rows]) and rows not in nodes.kept:
                given, factors = scaled.inputs
                if nodes.shape(given) == shape and nodes.shape(factors) == (shape[1],):
                    reads, gone = [given, factors], {*gone, scaled}
            yield _Call("RoundRows", tuple(reads), made, frozenset(gone), node.place)


def _scaled_rows(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        if node.kind != "Mul" or not (product := nodes.makers.get(node.inputs[0])):
            continue
        shape, scales = nodes.shape(node.outputs[0]), node.inputs[1]
        if product.kind != _INTEGER_PRODUCT or shape is None or nodes.shape(scales) != (shape[0], 1):
            continue
        reads, last, gone = [node.inputs[0], scales], node, {node}
        after = nodes.readers[node.outputs[0]]
        if len(after) == 1 and after[0].kind == "Add" and node.outputs[0] not in nodes.kept:
            left, bias = after[0].inputs
            if left == node.outputs[0] and nodes.shape(bias) == (shape[1],):
                reads, last, gone = [*reads, bias], after[0], {node, after[0]}
        yield _Call("ScaleRows", tuple(reads), tuple(last.outputs), frozenset(gone), last.place)


def _norms(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        if node.kind != "LayerNormalization" or node.attributes.get("axis") != (-1,) or len(node.inputs) != 3:
            continue
        shape = nodes.shape(node.inputs[0])
        if not shape or any(nodes.shape(name) != shape[-1:] for name in node.inputs[1:]):
            continue
        made = (*node.outputs, *(f"{node.outputs[0]}/{moment}" for moment in ("mean", "spread")[len(node.outputs) - 1 :]))
        number = ("epsilon", node.attributes.get("epsilon", (1e-5,))[0])
        yield _Call("LayerNorm", tuple(node.inputs), made, frozenset([node]), node.place, number)


def _column_sums(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        if node.kind != "ReduceSum" or node.attributes != {"keepdims": (1,)}:
            continue
        rows, axes = node.inputs
        if nodes.constants.get(axes) == (0,) and len(nodes.shape(rows) or ()) == 2:
            yield _Call("ColumnSums", (rows,), tuple(node.outputs), frozenset([node]), node.place)


def _weight_grads(nodes: _Nodes) -> Iterator[_Call]:
    for node in nodes.all:
        shape = nodes.shape(node.outputs[0]) if node.kind == "Gemm" and node.attributes == {"transA": (1,)} else None
        if shape is None or min(shape) < _LEAST_SIDE or any(nodes.shape(sums) != shape for sums in node.inputs[2:]):
            continue
        made = (*node.outputs, f"{node.outputs[0]}/packed")
        yield _Call("WeightGrad", tuple(node.inputs), made, frozenset([node]), node.place)


# --- rewriting ----------------------------------------------------------------------------------------


def rewritten(model: bytes, *, bfloat16: bool = False) -> bytes | None:
    """The graph with operators of the kernels where they can stand; None where they can nowhere.

    With `bfloat16` gradients of weights, too, if the graph has products of integers: others are computed as exactly as
    before. `model` has passed fedvit.onnx_file.check_self_contained.
    """
    parts = list(fields(model))
    [graph] = [part for part in parts if part.number == _GRAPH]
    entries = list(fields(graph.content))
    nodes = _Nodes(
        [_node(entry, place) for place, entry in enumerate(e for e in entries if e.number == _NODE)],
        dict(found for entry in entries if entry.number == _INITIALIZER and (found := _constant(entry.content))),
        {_name(entry.content) for entry in entries if entry.number == _OUTPUT},
        {_name(entry.content): entry.content for entry in entries if entry.number in (_INPUT, _OUTPUT, _BETWEEN)},
    )
    calls = [*_gelu_grads(nodes), *_norms(nodes), *_layer_norm_grads(nodes), *_attentions(nodes), *_column_sums(nodes)]
    if any(node.kind == _INTEGER_PRODUCT for node in nodes.all):
        calls += [*_rounded_rows(nodes), *_scaled_rows(nodes), *(_weight_grads(nodes) if bfloat16 else ())]
    if not calls:
        return None
    gone = {node for call in calls for node in call.replaced}
    read = {name for node in nodes.all if node not in gone for name in node.inputs} | nodes.kept
    gone |= {node for node in nodes.all if node.kind == _REPEATED and not read & {*node.outputs}}
    needed = {name for node in nodes.all if node not in gone for name in node.inputs}
    written = {node.place: node.encoded for node in nodes.all if node not in gone}
    written |= {call.place: call.encoded() for call in calls}
    changed = [bytes_field(_NODE, written[place]) for place in sorted(written)]
    for entry in entries:
        unused = entry.number == _INITIALIZER and _tensor_name(entry.content) not in needed
        if entry.number != _NODE and not unused:
            changed.append(entry.encoded())
    opset = bytes_field(_OPSETS, bytes_field(1, DOMAIN) + number_field(2, 1))
    others = [bytes_field(_GRAPH, b"".join(changed)) if part is graph else part.encoded() for part in parts]
    return b"".join((*others, opset))


def _name(content: bytes) -> str:
    return next(part.text for part in fields(content) if part.number == 1)


def _tensor_name(content: bytes) -> str:
    return next((part.text for part in fields(content) if part.number == 8), "")
