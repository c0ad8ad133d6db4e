"""The cost of a graph, counted on the graph that devices run: products, bytes, and memory by liveness."""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import onnx

from fedvit.kernels import DOMAIN as KERNELS
from fedvit.kernels import insert_kernels
from fedvit.resources import ProductKind
from profiles.graph_memory import VIEWS, GraphTensor, Shape, collect_tensors, compute_peak_bytes
from profiles.prediction import GraphWork, ProductWork


class Product(NamedTuple):
    """(rows x inner) (inner x columns), `batch` times."""

    kind: ProductKind
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """2 per multiply-add."""
        return 2 * self.batch * self.rows * self.inner * self.columns


class NodeCost(NamedTuple):
    """The cost of one operator of a graph, and its place in the model."""

    op: str
    product: Product | None
    moved_bytes: int  # read and written; 0 of a product
    block: str  # "embedding", "block 0", ..., "head"; see `block_of`
    kind: str  # part of the block: "attention", "mlp", ...
    forward: bool  # part of the forward pass, else of the backward pass
    vectors: int = 0  # read and written, of a length that the graph leaves open

    @property
    def flops(self) -> int:
        return self.product.flops if self.product else 0


@dataclass(frozen=True)
class GraphCost:
    nodes: tuple[NodeCost, ...]
    activation_bytes: int  # highest sum of the values between inputs and outputs (`compute_peak_bytes`)
    graph_bytes: int
    with_kernels: "GraphCost | None" = None  # of the graph into which a device puts the optional kernels

    @cached_property
    def flops(self) -> int:
        return sum(node.flops for node in self.nodes)

    @cached_property
    def work(self) -> GraphWork:
        """Work of one run."""
        products: dict[Product, float] = defaultdict(float)
        moved_bytes: dict[str, float] = defaultdict(float)
        for node in self.nodes:
            if node.product:
                products[node.product] += 1
            if node.moved_bytes:
                moved_bytes[node.op] += node.moved_bytes
        return GraphWork(
            products=[ProductWork(*product, count) for product, count in products.items()],
            moved_bytes=dict(moved_bytes),
            nodes=len(self.nodes),
        )


def graph_cost(content: bytes) -> GraphCost:
    """Price an ONNX graph.

    FLOPs count as in torch's FlopCounterMode: 2 per multiply-add of every matrix product; elementwise work, softmax and
    norms count 0. Raises ValueError when a product's shape is unknown, as the count would be too low.
    """
    changed = insert_kernels(content)
    with_kernels = replace(_price(changed), graph_bytes=len(content)) if changed else None
    return replace(_price(content), with_kernels=with_kernels)


def _price(content: bytes) -> GraphCost:
    graph = onnx.load_from_string(content).graph
    tensors = collect_tensors(graph)
    forward, fused, gradients = _find_forward(graph), _find_fused(graph), _find_gradients(graph)
    places = _find_places(graph, tensors, gradients)
    nodes: list[NodeCost] = []
    for node in graph.node:
        name = node.output[0]
        if node.domain == KERNELS and node.op_type in _ATTENTION:
            parts: list[tuple[str, Product | None, int]] = [*_list_parts_of_attention(node, tensors)]
        else:
            product = _measure_product(node, tensors, name in gradients)
            is_free = product or node.op_type in VIEWS or name in fused
            parts = [(node.op_type, product, 0 if is_free else _count_node_bytes(node, tensors))]
        vectors = sum(value not in tensors for value in (*node.input, *node.output) if value)
        nodes += (NodeCost(*part, *places[name], name in forward, vectors) for part in parts)
    return GraphCost(tuple(nodes), compute_peak_bytes(graph, tensors), len(content))


# --- products ---------------------------------------------------------------------------------------

_PRODUCTS = {"MatMul", "Gemm", "MatMulIntegerToFloat", "Conv", "ConvTranspose"}


def _measure_product(node: onnx.NodeProto, tensors: Mapping[str, GraphTensor], gradient: bool) -> Product | None:
    if node.op_type not in _PRODUCTS:
        return None
    read = node.input[:2] if node.op_type.startswith("Conv") else node.input[:1]
    if any(name not in tensors for name in (*read, node.output[0])):
        raise ValueError(f"{node.op_type} node {node.name!r} has an operand of unknown shape")
    left, out = tensors[node.input[0]].shape, tensors[node.output[0]].shape
    if node.op_type.startswith("Conv"):
        return _measure_convolution(
            node, left, tensors[node.input[1]].shape, out, "gradient" if gradient else "weights"
        )
    inner = left[0] if gradient and node.op_type == "Gemm" else left[-1]
    right = tensors[node.input[1]].shape if node.input[1] in tensors else ()
    if node.op_type == "MatMulIntegerToFloat":
        kind: ProductKind = "integers"
    elif tensors[node.input[0]].item_bytes == 2:
        kind = "halves"
    else:
        kind = "gradient" if gradient else "attention" if len(right) > 2 else "weights"
    columns = out[-1] if out else 1
    if kind == "attention":
        return Product(kind, math.prod(out[:-2]), out[-2], inner, columns)
    return Product(kind, 1, math.prod(out) // max(1, columns), inner, columns)


def _measure_convolution(node: onnx.NodeProto, read: Shape, weight: Shape, out: Shape, kind: ProductKind) -> Product:
    """Return the dimensions of a convolution as a product; its rows are the weight's places, or the input's values."""
    if node.op_type == "ConvTranspose":
        return Product(kind, 1, math.prod(read) // weight[0], weight[0], math.prod(weight[1:]))
    return Product(kind, 1, math.prod(out) // weight[0], math.prod(weight[1:]), weight[0])


def _find_gradients(graph: onnx.GraphProto) -> set[str]:
    """Find the products that sum over samples, into a weight's gradient.

    In a product of matrices the left operand is transposed, or the products of all samples are added up. A gradient's
    convolution is dilated by the stride of the forward convolution, also by a stride of 1.
    """
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node.op_type)
    found = set()
    for node in graph.node:
        flags = {attribute.name: attribute.i for attribute in node.attribute}
        if (
            (node.op_type == "Gemm" and flags.get("transA"))
            or (node.op_type == "Conv" and "dilations" in flags)
            or (node.op_type == "MatMul" and readers[node.output[0]] == ["ReduceSum"])
        ):
            found.add(node.output[0])
    return found


_ATTENTION = {"Attention": (1, 1), "AttentionGrad": (2, 3)}
"""Operator of the kernels -> numbers of its products queries x keys, and weights x values, or of this size."""


def _list_parts_of_attention(
    node: onnx.NodeProto, tensors: Mapping[str, GraphTensor]
) -> Iterator[tuple[str, Product | None, int]]:
    """List the products of an operator of the kernels and its softmax, as operator, product and moved bytes."""
    images, tokens, _, heads, width = tensors[node.input[0]].shape
    scores = Product("attention", images * heads, tokens, width, tokens)
    mixtures = Product("attention", images * heads, tokens, tokens, width)
    for product, count in zip((scores, mixtures), _ATTENTION[node.op_type], strict=True):
        for _ in range(count):
            yield "MatMul", product, 0
    yield "Softmax", None, 2 * 4 * images * heads * tokens**2


def _count_node_bytes(node: onnx.NodeProto, tensors: Mapping[str, GraphTensor]) -> int:
    return sum(tensors[name].size_bytes for name in (*node.input, *node.output) if name in tensors)


def _find_fused(graph: onnx.GraphProto) -> set[str]:
    """Find the transposed values that onnxruntime replaces by a flag of the products that read them."""
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node.op_type)
    turned = [node for node in graph.node if node.op_type == "Transpose" and set(readers[node.output[0]]) == {"MatMul"}]
    return {node.output[0] for node in turned if _swaps_the_last_two(node)}


def _swaps_the_last_two(node: onnx.NodeProto) -> bool:
    order = next(list(attribute.ints) for attribute in node.attribute if attribute.name == "perm")
    rank = len(order)
    return rank > 2 and order == [*range(rank - 2), rank - 1, rank - 2]


# --- where a node belongs -----------------------------------------------------------------------------


def _find_forward(graph: onnx.GraphProto) -> set[str]:
    """Find the values from which the loss, an answer or a collected value follows."""
    made_by = {name: node for node in graph.node for name in node.output}
    ends = [output.name for output in graph.output if not output.name.startswith("new/")]
    seen: set[str] = set()
    while ends:
        name = ends.pop()
        if name not in seen:
            seen.add(name)
            ends += made_by[name].input if name in made_by else ()
    return seen


def block_of(tensor: str) -> tuple[str, str]:
    """Return (block, kind) of a model's tensor by its name.

    >>> block_of("blocks.11.attn.qkv.weight"), block_of("head.weight"), block_of("patch_embed.proj.bias")
    (('block 11', 'attention'), ('head', 'head'), ('embedding', 'embedding'))
    """
    if found := re.search(r"(?:^|\.)blocks\.(\d+)\.(\w+)", tensor):
        part = found[2]
        return f"block {found[1]}", {"attn": "attention"}.get(part, part)
    first = re.sub(r"^[a-z]*/", "", tensor).split(".")[0]
    if first in ("patch_embed", "pos_embed", "cls_token", "reg_token", "token_embed", "stem", "norm_pre", "embedding"):
        return "embedding", "embedding"
    return ("head", "head") if "head" in first or first in ("norm", "fc_norm") else (first, first)


def _find_places(
    graph: onnx.GraphProto, tensors: Mapping[str, GraphTensor], gradients: set[str]
) -> dict[str, tuple[str, str]]:
    """Return (block, kind) of each node, by its first output.

    A node belongs to the block of the largest tensor that it reads or whose gradient it adds to, else to that of the
    nearest node before it: the products of an attention read only results of its block's weights.

    Values made of tensors alone (unpacked, mixed) count as these tensors. A product that is a weight's gradient belongs
    to the nearest tensor after it, as its operands may come from any block.
    """
    named: dict[str, tuple[str, str]] = {}
    for value in graph.input:
        group, _, tensor = value.name.partition("/")
        if group in ("tensor", "grad", "anchor"):
            named[value.name] = block_of(tensor)
    places: dict[str, tuple[str, str]] = {}
    known: dict[str, tuple[str, str]] = dict(named)
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    fixed = {tensor.name for tensor in graph.initializer}
    fixed |= {node.output[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    for node in graph.node:
        read = [name for name in reversed(node.input) if name in named]
        largest = max(read, key=lambda name: tensors[name].size_bytes if name in tensors else 0, default=None)
        own = None if largest is None else named[largest]
        if own is None and node.output[0] in gradients:
            [added] = readers[node.output[0]] if node.op_type == "MatMul" else [node]
            own = _find_nearest_after(added, readers, named, tensors)
        if own is None:
            own = next((known[name] for name in node.input if name in known), ("embedding", "embedding"))
        for name in node.output:
            known[name] = own
            if read and all(operand in named or operand in fixed for operand in node.input):
                named[name] = own
        places[node.output[0]] = own
    return places


def _find_nearest_after(
    node: onnx.NodeProto,
    readers: Mapping[str, list[onnx.NodeProto]],
    named: Mapping[str, tuple[str, str]],
    tensors: Mapping[str, GraphTensor],
) -> tuple[str, str] | None:
    """Find the place of the nearest tensor after a node that is not smaller than the node's result."""
    least = tensors[node.output[0]].size_bytes if node.output[0] in tensors else 0
    waiting = deque(node.output)
    seen = set(waiting)
    while waiting:
        for reader in readers[waiting.popleft()]:
            for name in reader.input:
                if name in named and name in tensors and tensors[name].size_bytes >= least:
                    return named[name]
            further = [name for name in reader.output if name not in seen]
            seen.update(further)
            waiting += further
    return None


def flop_shares(cost: GraphCost, runs: int = 1) -> Iterator[tuple[str, str, int, int]]:
    """Yield (block, kind, forward FLOPs, backward FLOPs) of several runs, in the model's order."""
    shares: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for node in cost.nodes:
        if node.flops:
            shares[node.block, node.kind][not node.forward] += runs * node.flops
    for (block, kind), (forward, backward) in sorted(shares.items(), key=lambda share: _sort_key(share[0])):
        yield block, kind, forward, backward


def _sort_key(share: tuple[str, str]) -> tuple[int, int, str]:
    block, kind = share
    number = int(block.split()[1]) if block.startswith("block ") else 0
    return {"embedding": 0, "head": 2}.get(block, 1), number, kind
