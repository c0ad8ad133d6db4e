"""Which nodes the operators of ours stand for."""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fedvit.kernels.nodes import Node, Nodes
from fedvit.kernels.patterns import Match, pattern
from fedvit.protobuf import bytes_field, number_field

DOMAIN = "fedvit.kernels"

_INTEGER_PRODUCT = "MatMulIntegerToFloat of com.microsoft"
_TILE_ROWS, _TILE_INNER, _TILE_COLUMNS = 32, 64, 32
"""What products of integers with AMX are made of."""
_LEAST_SIDE = 32
"""Of a weight whose gradient is worth other products than the engine's own."""

_MOST_BEHIND = 256
"""Nodes shortly behind one tensor: about 30 in graphs of fedvit, any number in a hostile one."""

_GELU_GRAD = pattern("""
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
_LAYER_NORM_GRAD = pattern("""
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
_NORM_SUMS = pattern("""
    v = Mul g n
    dw = ReduceSum v #rows keepdims:0
""")
_BIAS_SUMS = pattern("""
    db = ReduceSum g #rows keepdims:0
""")
_ATTENTION = pattern("""
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
_ATTENTION_GRAD = pattern("""
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
_ROUND_ROWS = pattern("""
    hi = ReduceMax x #last keepdims:1
    lo = ReduceMin x #last keepdims:1
    d = Neg lo
    m = Max hi d #tiny
    s = Mul m #step
    y = QuantizeLinear x s #zero axis:1
""")


@dataclass(frozen=True)
class Call:
    """A node with an operator of ours, in place of others."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    replaced: frozenset[Node]
    place: int  # of the node in whose place it stands
    number: tuple[str, float] | None = None  # an attribute

    def encoded(self) -> bytes:
        parts = [bytes_field(1, name) for name in self.inputs]
        parts += [bytes_field(2, name) for name in self.outputs]
        parts += [bytes_field(3, f"{self.kind}/{self.outputs[0]}"), bytes_field(4, self.kind)]
        if self.number:  # name, number, type: a float
            name, number = self.number
            value = b"\x15" + struct.pack("<f", number)
            parts.append(bytes_field(5, bytes_field(1, name) + value + number_field(20, 1)))
        return b"".join((*parts, bytes_field(7, DOMAIN)))


def replacements(nodes: Nodes, amx: bool) -> list[Call]:
    """All that can stand for nodes of this graph."""
    calls = [*_gelu_grads(nodes), *_norms(nodes), *_layer_norm_grads(nodes), *_attentions(nodes), *_column_sums(nodes)]
    if any(node.kind == _INTEGER_PRODUCT for node in nodes.all):
        calls += [*_rounded_rows(nodes), *_scaled_rows(nodes, amx), *(_weight_grads(nodes) if amx else ())]
    return calls


def _gelu_grads(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        match = Match({}, set()).extended(nodes, _GELU_GRAD, node) if node.kind == "Mul" else None
        height, root = 2 / math.sqrt(math.pi), math.sqrt(0.5)
        if match and match.closed(nodes, "y") and match.has(nodes, root=[root], height=[height], one=[1], half=[0.5]):
            reads = (match.names["g"], match.names["x"])
            yield Call("GeluGrad", reads, (match.names["y"],), frozenset(match.nodes), node.place)


def _layer_norm_grads(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        match = Match({}, set()).extended(nodes, _LAYER_NORM_GRAD, node) if node.kind == "Mul" else None
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
        for sums, of in ((_NORM_SUMS, "n"), (_BIAS_SUMS, "g")):
            ends = (last for reader in nodes.readers[names[of]] for last in _ends(nodes, reader))
            found = (match.extended(nodes, sums, last) for last in islice(ends, _MOST_BEHIND))
            rows = [float(axis) for axis in range(int(axes[0]))]
            for more in found:
                if more and more.has(nodes, rows=rows):
                    match, result = more, sums[-1].outputs[0]
                    shown.append(result)
                    break
        if not match.closed(nodes, *shown):
            continue
        made = tuple(match.names.get(result, f"{node.outputs[0]}/{result}") for result in ("y", "dw", "db"))
        reads = tuple(match.names[name] for name in ("g", "x", "m", "r", "w"))
        # before the first that reads one of the three; what it reads is there when the scaled gradient is
        place = max(nodes.makers[match.names[name]].place for name in ("s", "c"))
        yield Call("LayerNormGrad", reads, made, frozenset(match.nodes), place)


def _ends(nodes: Nodes, reader: Node) -> list[Node]:
    """Return a node that reads, and the nodes that read its outputs."""
    return [reader, *(after for name in reader.outputs for after in nodes.readers[name])]


def _attentions(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        match = Match({}, set()).extended(nodes, _ATTENTION, node) if node.kind == "Transpose" else None
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
            yield Call("Attention", reads, tuple(node.outputs), frozenset(match.nodes), node.place, scale)
            yield Call("AttentionGrad", reads + left, made, frozenset(gradient), last.place, scale)
        elif match.closed(nodes, "o"):
            yield Call("Attention", reads, tuple(node.outputs), frozenset(match.nodes), node.place, scale)


def _behind(nodes: Nodes, name: str, depth: int) -> list[Node]:
    """Find the nodes that depend on a tensor by a path of at most `depth` nodes; none if they are too many."""
    reached: dict[Node, None] = {}
    names = [name]
    for _ in range(depth):
        after = dict.fromkeys(node for name in names for node in nodes.readers[name] if node not in reached)
        reached |= after
        if len(reached) > _MOST_BEHIND:
            return []
        names = [name for node in after for name in node.outputs]
    return list(reached)


def _is_attention(nodes: Nodes, match: Match) -> bool:
    """Whether all lengths are those of heads side by side."""
    lengths = nodes.constants[match.names["#bnhw"]]  # of one of three pieces
    if len(lengths) != 4 or len(nodes.constants[match.names["#scale"]]) != 1:
        return False
    b, n, h, w = lengths
    shapes: dict[str, Sequence[float]] = {"anw": [b * h, n, w], "awn": [b * h, w, n], "ann": [b * h, n, n]}
    shapes |= {"bhnn": [b, h, n, n], "bhnw": [b, h, n, w], "bn1hw": [b, n, 1, h, w], "ones": [1, 1, 1], "last": [3]}
    return match.has(nodes, **shapes)


def _rounded_rows(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        match = Match({}, set()).extended(nodes, _ROUND_ROWS, node) if node.kind == "QuantizeLinear" else None
        if match is None or not match.closed(nodes, "s", "y") or not match.has(nodes, last=[1], tiny=[1e-30]):
            continue
        rows, scales = match.names["x"], match.names["s"]
        shape = nodes.shape(rows)
        if shape is None or len(shape) != 2 or node.attributes.get("block_size") != (shape[1],):
            continue
        made = (node.outputs[0], scales)
        if match.has(nodes, step=[1 / 64], zero=[0]):
            yield Call("RoundWeights", (rows,), made, frozenset(match.nodes), node.place)
        elif match.has(nodes, step=[1 / 127], zero=[128]):
            reads, gone = [rows], match.nodes
            scaled = nodes.makers.get(rows)
            if scaled and scaled.kind == "Mul" and gone.issuperset(nodes.readers[rows]) and rows not in nodes.kept:
                given, factors = scaled.inputs
                if nodes.shape(given) == shape and nodes.shape(factors) == (shape[1],):
                    reads, gone = [given, factors], {*gone, scaled}
            yield Call("RoundRows", tuple(reads), made, frozenset(gone), node.place)


def _scaled_rows(nodes: Nodes, amx: bool) -> Iterator[Call]:
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
        yield (amx and _integer_product(nodes, product, reads, last, gone)) or Call(
            "ScaleRows", tuple(reads), tuple(last.outputs), frozenset(gone), last.place
        )


def _integer_product(nodes: Nodes, product: Node, reads: list[str], last: Node, gone: set[Node]) -> Call | None:
    """Of what is scaled there, by a weight as it lies; None where AMX's tiles do not divide it."""
    if len(product.inputs) < 5:
        return None
    rounded, weight, one, scales, zero = product.inputs[:5]
    left, made = nodes.shape(rounded), nodes.shape(last.outputs[0])
    if left is None or made is None or len(left) != 2 or len(made) != 2:
        return None
    if left[0] < _TILE_ROWS or left[1] % _TILE_INNER or made[1] % _TILE_COLUMNS:
        return None
    whole, *others = product.outputs
    plain = not others and len(nodes.readers[whole]) == 1 and whole not in nodes.kept and not any(product.inputs[5:])
    if not plain or nodes.constants.get(one) != (1,) or nodes.constants.get(zero) != (128,):
        return None
    turned = nodes.makers.get(weight)
    if turned and turned.kind == "Transpose" and turned.attributes == {"perm": (1, 0)}:
        weight = turned.inputs[0]
        if nodes.readers[turned.outputs[0]] == [product] and turned.outputs[0] not in nodes.kept:
            gone = {*gone, turned}
    else:
        turned = None
    return Call(
        "IntegerProduct",
        (rounded, reads[1], weight, scales, *reads[2:]),
        tuple(last.outputs),
        frozenset({*gone, product}),
        last.place,
        ("turned", float(turned is not None)),
    )


def _norms(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        if node.kind != "LayerNormalization" or node.attributes.get("axis") != (-1,) or len(node.inputs) != 3:
            continue
        shape = nodes.shape(node.inputs[0])
        if not shape or any(nodes.shape(name) != shape[-1:] for name in node.inputs[1:]):
            continue
        unread = ("mean", "spread")[len(node.outputs) - 1 :]
        made = (*node.outputs, *(f"{node.outputs[0]}/{moment}" for moment in unread))
        number = ("epsilon", node.attributes.get("epsilon", (1e-5,))[0])
        yield Call("LayerNorm", tuple(node.inputs), made, frozenset([node]), node.place, number)


def _column_sums(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        if node.kind != "ReduceSum" or node.attributes != {"keepdims": (1,)} or len(node.inputs) != 2:
            continue
        rows, axes = node.inputs
        if nodes.constants.get(axes) == (0,) and len(nodes.shape(rows) or ()) == 2:
            yield Call("ColumnSums", (rows,), tuple(node.outputs), frozenset([node]), node.place)


def _weight_grads(nodes: Nodes) -> Iterator[Call]:
    for node in nodes.all:
        shape = nodes.shape(node.outputs[0]) if node.kind == "Gemm" and node.attributes == {"transA": (1,)} else None
        if shape is None or min(shape) < _LEAST_SIDE or any(nodes.shape(sums) != shape for sums in node.inputs[2:]):
            continue
        yield Call("WeightGrad", tuple(node.inputs), tuple(node.outputs), frozenset([node]), node.place)
