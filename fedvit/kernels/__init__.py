"""Optional operators of our own, for what onnxruntime computes in many passes, or slowly: attention, LayerNorm,
gradients of these and of GELU, sums of columns, what rounds around products of integers, and gradients of weights in
bfloat16.

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

__all__ = ["DOMAIN", "EXTRA", "PACKAGE", "fast_bfloat16", "library", "rewritten"]

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
def fast_bfloat16(path: Path) -> bool:
    """Whether products of bfloat16 are faster on this processor than those of floats. Raises OSError if the library
    cannot be loaded.
    """
    return bool(ctypes.CDLL(str(path)).fedvit_fast_bfloat16())


def rewritten(model: bytes, *, bfloat16: bool = False) -> bytes | None:
    """The graph with operators of the kernels where they can stand; None where they can nowhere.

    With `bfloat16` gradients of weights, too, if the graph has products of integers: others are computed as exactly as
    before. `model` has passed fedvit.onnx_file.check_self_contained.
    """
    parts = list(fields(model))
    [graph] = [part for part in parts if part.number == _GRAPH]
    entries = list(fields(graph.content))
    nodes = read_nodes(entries)
    calls = replacements(nodes, bfloat16)
    if not calls:
        return None
    gone = {node for call in calls for node in call.replaced}
    read = {name for node in nodes.all if node not in gone for name in node.inputs} | nodes.kept
    gone |= {node for node in nodes.all if node.kind == REPEATED and not read & {*node.outputs}}
    needed = {name for node in nodes.all if node not in gone for name in node.inputs}
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
