"""Find the parts of a graph that operators of the kernels can replace."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fedvit.kernels.patterns import GraphIndex, Match, PatternStep, parse_pattern
from fedvit.onnx_model import Node, make_node

DOMAIN = "fedvit.kernels"

_INTEGER_PRODUCT = "com.microsoft.MatMulIntegerToFloat"
_MOST_BEHIND = 256
"""Nodes that depend on one tensor by a short path: about 30 in graphs of fedvit, any number in a hostile graph."""

_GELU_GRAD = parse_pattern("""
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
_LAYER_NORM_GRAD = parse_pattern("""
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
_NORM_SUMS = parse_pattern("""
    v = Mul g n
    dw = ReduceSum v #rows keepdims:0
""")
_BIAS_SUMS = parse_pattern("""
    db = ReduceSum g #rows keepdims:0
""")
_ATTENTION = parse_pattern("""
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
_ATTENTION_GRAD = parse_pattern("""
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
_ROUND_ROWS = parse_pattern("""
    hi = ReduceMax x #last keepdims:1
    lo = ReduceMin x #last keepdims:1
    d = Neg lo
    m = Max hi d #tiny
    s = Mul m #step
    y = QuantizeLinear x s #zero axis:1
""")
_ADAMW = parse_pattern("""
    a = Mul m #kept_mean
    b = Mul g #new_mean
    m1 = Add a b
    c = Mul v #kept_square
    d = Mul g #new_square
    e = Mul d g
    v1 = Add c e
    k = Mul x kept
    s = Mul rate m1
    r = Sqrt v1
    f = Add r least
    q = Div s f
    y = Sub k q
""")


@dataclass(frozen=True)
class Call:
    """A node with an operator of the kernels, the nodes that it replaces, and its place among the model's nodes."""

    node: Node
    replaced: frozenset[Node]
    place: int


def find_replacements(graph: GraphIndex) -> list[Call]:
    """Find all operators of the kernels that can replace nodes of this graph."""
    calls = [
        *_find_gelu_grads(graph),
        *_find_layer_norms(graph),
        *_find_layer_norm_grads(graph),
        *_find_attentions(graph),
        *_find_column_sums(graph),
        *_find_adamw_updates(graph),
    ]
    if any(node.operator == _INTEGER_PRODUCT for node in graph.nodes):
        calls += [*_find_row_roundings(graph), *_find_row_scalings(graph)]
    return calls


def _call(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], replaced: set[Node], place: int, **number: float
) -> Call:
    return Call(make_node(kind, inputs, outputs, domain=DOMAIN, **number), frozenset(replaced), place)


def _find_matches(graph: GraphIndex, pattern: Sequence[PatternStep]) -> Iterator[tuple[Node, Match]]:
    """Yield each match of a pattern with its last node."""
    for last in graph.nodes:
        if last.operator == pattern[-1].operator and (match := Match({}, set()).extend(graph, pattern, last)):
            yield last, match


def _find_gelu_grads(graph: GraphIndex) -> Iterator[Call]:
    height, root = 2 / math.sqrt(math.pi), math.sqrt(0.5)
    for last, match in _find_matches(graph, _GELU_GRAD):
        if match.is_closed(graph, "y") and match.has(graph, root=[root], height=[height], one=[1], half=[0.5]):
            inputs = (match.names["g"], match.names["x"])
            yield _call("GeluGrad", inputs, [match.names["y"]], match.nodes, graph.places[last])


def _find_layer_norm_grads(graph: GraphIndex) -> Iterator[Call]:
    for last, match in _find_matches(graph, _LAYER_NORM_GRAD):
        if not _is_norm_of_rows(graph, match):
            continue
        whole, results = _add_sums(graph, match)
        if not whole.is_closed(graph, "y", *results):
            continue
        names = whole.names
        outputs = [names.get(result, f"{last.outputs[0]}/{result}") for result in ("y", "dw", "db")]
        inputs = [names[name] for name in ("g", "x", "m", "r", "w")]
        # before the first node that reads an output; all inputs exist when the scaled gradient does
        place = max(graph.places[graph.makers[names[name]]] for name in ("s", "c"))
        yield _call("LayerNormGrad", inputs, outputs, whole.nodes, place)


def _is_norm_of_rows(graph: GraphIndex, match: Match) -> bool:
    """Return whether mean and deviation are results of a LayerNormalization over the last axis of the same tensor."""
    names = match.names
    norm = graph.makers.get(names["m"])
    if norm is None or norm.operator != "LayerNormalization" or norm.attributes.get("axis") != (-1,):
        return False
    moments = (names["m"], names["r"])
    return norm.outputs[1:] == moments and norm.inputs[0] == names["x"] and len(graph.constants[names["#axes"]]) == 1


def _add_sums(graph: GraphIndex, match: Match) -> tuple[Match, list[str]]:
    """Extend a gradient of LayerNorm by the gradients of its factors and offsets, as far as the graph has them."""
    rows = [float(axis) for axis in range(int(graph.constants[match.names["#axes"]][0]))]
    results = []
    for sums, source in ((_NORM_SUMS, "n"), (_BIAS_SUMS, "g")):
        ends = (last for reader in graph.readers[match.names[source]] for last in _with_readers(graph, reader))
        for last in islice(ends, _MOST_BEHIND):
            extended = match.extend(graph, sums, last)
            if extended and extended.has(graph, rows=rows):
                match = extended
                results.append(sums[-1].outputs[0])
                break
    return match, results


def _with_readers(graph: GraphIndex, node: Node) -> list[Node]:
    """Return a node and the nodes that read its outputs."""
    return [node, *(reader for name in node.outputs for reader in graph.readers[name])]


def _find_attentions(graph: GraphIndex) -> Iterator[Call]:
    for last, match in _find_matches(graph, _ATTENTION):
        if not _is_attention(graph, match):
            continue
        scale = graph.constants[match.names["#scale"]][0]
        ends = (end for end in _find_behind(graph, match.names["q"], depth=6) if end.operator == "Concat")
        grads = [both for end in ends if (both := match.extend(graph, _ATTENTION_GRAD, end))]
        both = grads[0] if len(grads) == 1 and _is_attention(graph, grads[0]) else None
        has_grad = both is not None and both.is_closed(graph, "o", "y")
        if has_grad or match.is_closed(graph, "o"):
            qkv = match.names["z"]
            yield _call("Attention", [qkv], last.outputs, match.nodes, graph.places[last], scale=scale)
            if both is not None and has_grad:
                end, inputs = both.names["y"], [qkv, both.names["g"]]
                place = graph.places[graph.makers[end]]
                yield _call("AttentionGrad", inputs, [end], both.nodes - match.nodes, place, scale=scale)


def _find_behind(graph: GraphIndex, name: str, depth: int) -> list[Node]:
    """Find the nodes that depend on a tensor by a path of at most `depth` nodes; none if they are too many."""
    reached: dict[Node, None] = {}
    names = [name]
    for _ in range(depth):
        after = dict.fromkeys(node for name in names for node in graph.readers[name] if node not in reached)
        reached |= after
        if len(reached) > _MOST_BEHIND:
            return []
        names = [name for node in after for name in node.outputs]
    return list(reached)


def _is_attention(graph: GraphIndex, match: Match) -> bool:
    """Return whether all lengths are those of heads side by side."""
    lengths = graph.constants[match.names["#bnhw"]]  # of queries, of keys and of values
    if len(lengths) != 4 or len(graph.constants[match.names["#scale"]]) != 1:
        return False
    b, n, h, w = lengths
    shapes: dict[str, Sequence[float]] = {"anw": [b * h, n, w], "awn": [b * h, w, n], "ann": [b * h, n, n]}
    shapes |= {"bhnn": [b, h, n, n], "bhnw": [b, h, n, w], "bn1hw": [b, n, 1, h, w], "ones": [1, 1, 1], "last": [3]}
    return match.has(graph, **shapes)


def _find_row_roundings(graph: GraphIndex) -> Iterator[Call]:
    for last, match in _find_matches(graph, _ROUND_ROWS):
        if not match.is_closed(graph, "s", "y") or not match.has(graph, last=[1], tiny=[1e-30]):
            continue
        rows = match.names["x"]
        shape = graph.shape(rows)
        if shape is None or len(shape) != 2 or last.attributes.get("block_size") != (shape[1],):
            continue
        outputs = [last.outputs[0], match.names["s"]]
        if match.has(graph, step=[1 / 64], zero=[0]):
            yield _call("RoundWeights", [rows], outputs, match.nodes, graph.places[last])
        elif match.has(graph, step=[1 / 127], zero=[128]):
            inputs, replaced = [rows], match.nodes
            product = graph.makers.get(rows)
            if product and product.operator == "Mul" and _reads_only(graph, rows, replaced):
                entered, factors = product.inputs
                if graph.shape(entered) == shape and graph.shape(factors) == (shape[1],):
                    inputs, replaced = [entered, factors], {*replaced, product}
            yield _call("RoundRows", inputs, outputs, replaced, graph.places[last])


def _reads_only(graph: GraphIndex, name: str, nodes: set[Node]) -> bool:
    """Return whether no other nodes read a tensor, and the graph does not return it."""
    return nodes.issuperset(graph.readers[name]) and name not in graph.outputs


def _find_row_scalings(graph: GraphIndex) -> Iterator[Call]:
    for node in graph.nodes:
        if node.operator != "Mul" or not (product := graph.makers.get(node.inputs[0])):
            continue
        scaled, scales = node.outputs[0], node.inputs[1]
        shape = graph.shape(scaled)
        if product.operator != _INTEGER_PRODUCT or shape is None or graph.shape(scales) != (shape[0], 1):
            continue
        inputs, last, replaced = [node.inputs[0], scales], node, {node}
        readers = graph.readers[scaled]
        if len(readers) == 1 and readers[0].operator == "Add" and scaled not in graph.outputs:
            left, bias = readers[0].inputs
            if left == scaled and graph.shape(bias) == (shape[1],):
                inputs, last, replaced = [*inputs, bias], readers[0], {node, readers[0]}
        yield _call("ScaleRows", inputs, last.outputs, replaced, graph.places[last])


def _find_layer_norms(graph: GraphIndex) -> Iterator[Call]:
    for node in graph.nodes:
        is_last_axis = node.operator == "LayerNormalization" and node.attributes.get("axis") == (-1,)
        if not is_last_axis or len(node.inputs) != 3:
            continue
        shape = graph.shape(node.inputs[0])
        if not shape or any(graph.shape(name) != shape[-1:] for name in node.inputs[1:]):
            continue
        unread = ("mean", "spread")[len(node.outputs) - 1 :]
        outputs = (*node.outputs, *(f"{node.outputs[0]}/{moment}" for moment in unread))
        epsilon = node.attributes.get("epsilon", (1e-5,))[0]
        yield _call("LayerNorm", node.inputs, outputs, {node}, graph.places[node], epsilon=epsilon)


def _find_column_sums(graph: GraphIndex) -> Iterator[Call]:
    for node in graph.nodes:
        if node.operator != "ReduceSum" or node.attributes != {"keepdims": (1,)} or len(node.inputs) != 2:
            continue
        rows, axes = node.inputs
        if graph.constants.get(axes) == (0,) and len(graph.shape(rows) or ()) == 2:
            yield _call("ColumnSums", [rows], node.outputs, {node}, graph.places[node])


def _find_adamw_updates(graph: GraphIndex) -> Iterator[Call]:
    for last, match in _find_matches(graph, _ADAMW):
        names = match.names
        factors = [names[name] for name in ("#kept_mean", "#new_mean", "#kept_square", "#new_square")]
        scalars = [names[name] for name in ("kept", "rate", "least")]
        slots = [names[name] for name in ("m1", "v1")]
        is_scaled_by_numbers = all(len(graph.constants[name]) == 1 for name in factors)
        is_scaled_by_numbers &= all(graph.shape(name) == () for name in scalars)
        is_closed = match.is_closed(graph, "y", "m1", "v1")
        if is_scaled_by_numbers and is_closed and all(match.nodes.issuperset(graph.readers[slot]) for slot in slots):
            inputs = [names["x"], names["g"], names["m"], names["v"], *factors, *scalars]
            yield _call("AdamW", inputs, [names["y"], *slots], match.nodes, graph.places[last])
