"""Optional operators of fedvit's own, for operations that onnxruntime computes in many passes or slowly: attention,
LayerNorm, the gradients of these and of GELU, sums of columns, and the rounding around products of integers.

They are in a separate package, `fedvit[kernels]`. A graph that is sent never contains them. A device with the package
replaces nodes of the graph just before it opens the graph. It replaces nodes only if nothing else reads their
intermediate results, and if all shapes and numbers are those of the pattern. The exporter does not mark such nodes: a
device could not trust the marks of a graph that it received, and would have to compare every node in any case.
"""

import functools
import importlib
from dataclasses import replace
from pathlib import Path

from fedvit.kernels.patterns import REPEATED, GraphIndex
from fedvit.kernels.replacements import DOMAIN, find_replacements
from fedvit.onnx_model import read_model, write_model

__all__ = ["DOMAIN", "EXTRA", "PACKAGE", "find_library", "insert_kernels"]

PACKAGE = "fedvit_kernels"
EXTRA = "fedvit[kernels]"


@functools.cache
def find_library() -> Path | None:
    """Return the library with the operators, if it is installed."""
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return None
    library: Path = package.LIBRARY
    return library


def insert_kernels(content: bytes) -> bytes | None:
    """Replace nodes of a graph by operators of the kernels. Return None if they can replace nothing.

    `content` has passed fedvit.onnx_file.check_self_contained.
    """
    model = read_model(content)
    graph = GraphIndex(model)
    calls = find_replacements(graph)
    if not calls:
        return None
    removed = {node for call in calls for node in call.replaced}
    fixed = graph.outputs.union(*(call.node.inputs for call in calls))
    read = {name for node in model.nodes if node not in removed for name in node.inputs} | fixed
    removed |= {node for node in model.nodes if node.operator == REPEATED and not read & {*node.outputs}}
    nodes = {place: node for node, place in graph.places.items() if node not in removed}
    read = {name for node in nodes.values() for name in node.inputs} | fixed
    nodes |= {call.place: call.node for call in calls}
    changed = replace(
        model.with_operators_of(DOMAIN),
        nodes=tuple(nodes[place] for place in sorted(nodes)),
        constants={name: tensor for name, tensor in model.constants.items() if name in read},
    )
    return b"".join(write_model(changed, {}, {}))
