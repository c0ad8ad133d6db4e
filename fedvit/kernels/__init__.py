"""Optional operators of our own, for what onnxruntime computes in many passes, or slowly: attention, LayerNorm,
gradients of these and of GELU, sums of columns, what rounds around products of integers, and, with AMX, these products
and gradients of weights in bfloat16.

They are in a package of their own, `fedvit[kernels]`. Graphs that are sent never contain them: where the package is
installed, a device replaces nodes of the graph that it was sent, just before it opens it. Nodes are replaced only
if nothing else reads what is computed inside of them, and if all of their shapes and numbers are those of the pattern.
"""

import ctypes
import functools
import importlib
from pathlib import Path

from fedvit.kernels.nodes import INITIALIZER, NODE, REPEATED, read_nodes, tensor_name
from fedvit.kernels.replacements import DOMAIN, replacements
from fedvit.protobuf import bytes_field, fields, number_field

__all__ = ["DOMAIN", "EXTRA", "PACKAGE", "has_amx", "library", "rewritten"]

PACKAGE = "fedvit_kernels"
EXTRA = "fedvit[kernels]"

_GRAPH, _OPSETS = 7, 8  # fields of a model


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
def has_amx(path: Path) -> bool:
    """Whether this processor has AMX and the system lets programs use it. Raises OSError where it cannot be loaded."""
    return bool(ctypes.CDLL(str(path)).fedvit_has_amx())


def rewritten(model: bytes, *, amx: bool = False) -> bytes | None:
    """The graph with operators of the kernels where they can stand; None where they can nowhere.

    With `amx` products of integers, too, and in graphs that have these, gradients of weights in bfloat16; graphs of
    floats stay as exact as before. `model` has passed fedvit.onnx_file.check_self_contained.
    """
    parts = list(fields(model))
    [graph] = [part for part in parts if part.number == _GRAPH]
    entries = list(fields(graph.content))
    nodes = read_nodes(entries)
    calls = replacements(nodes, amx)
    if not calls:
        return None
    gone = {node for call in calls for node in call.replaced}
    given = nodes.kept.union(*(call.inputs for call in calls))
    read = {name for node in nodes.all if node not in gone for name in node.inputs} | given
    gone |= {node for node in nodes.all if node.kind == REPEATED and not read & {*node.outputs}}
    needed = {name for node in nodes.all if node not in gone for name in node.inputs} | given
    written = {node.place: node.encoded for node in nodes.all if node not in gone}
    written |= {call.place: call.encoded() for call in calls}
    changed = [bytes_field(NODE, written[place]) for place in sorted(written)]
    for entry in entries:
        unused = entry.number == INITIALIZER and tensor_name(entry.content) not in needed
        if entry.number != NODE and not unused:
            changed.append(entry.encoded())
    opset = bytes_field(_OPSETS, bytes_field(1, DOMAIN) + number_field(2, 1))
    others = [bytes_field(_GRAPH, b"".join(changed)) if part is graph else part.encoded() for part in parts]
    return b"".join((*others, opset))
