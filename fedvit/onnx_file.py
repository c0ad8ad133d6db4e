"""What a device refuses in an ONNX file before its engine sees it: reading any other file.

A weight may be said to lie in a file beside the graph; onnxruntime opens that file, and versions before 1.23 also
where it lies outside the graph's folder. Our graphs never have one, so none may.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from fedvit.errors import BadPayload

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_DEEPEST = 64
"""Graphs inside of nodes inside of graphs; ours have none."""

# onnx.proto: by message, the fields that lead to tensors
_INSIDE = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_OP_TYPE = 4
_REFUSED_OPERATORS = (b"EPContext",)
"""Of some execution providers: it names a file with a compiled graph."""


def check_self_contained(path: Path) -> None:
    """Raises BadPayload when the file is no ONNX model, or when reading it would read another file.

    Weights are passed over where they lie, so that this takes milliseconds for a graph of any size.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if not _check(content, 0, len(content), "model", 0):
                raise BadPayload("it holds no graph")
    except ValueError:  # an empty file cannot be mapped
        raise BadPayload(f"graph {path.name} is empty") from None
    except BadPayload as error:
        raise BadPayload(f"graph {path.name} is refused: {error}") from None


def _check(content: mmap.mmap, begin: int, end: int, what: str, depth: int) -> bool:
    """Look through one message; whether it holds anything that is looked into."""
    if depth > _DEEPEST:
        raise BadPayload(f"its graphs are nested more than {_DEEPEST} deep")
    found = False
    for number, kind, first, last in _fields(content, begin, end):
        if what == "tensor" and (number == _EXTERNAL_DATA or (number == _DATA_LOCATION and first != 0)):
            raise BadPayload("a tensor lies in another file")
        if what == "node" and number == _OP_TYPE and kind == _LENGTH and content[first:last] in _REFUSED_OPERATORS:
            raise BadPayload(f"it has an operator {content[first:last].decode()}, which reads another file")
        if inner := _INSIDE[what].get(number):
            if kind != _LENGTH:
                raise BadPayload(f"not protobuf: field {number} of a {what} is of kind {kind}")
            _check(content, first, last, inner, depth + 1)
            found = True
    return found


def _fields(content: mmap.mmap, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, kind, begin, end) of each field; of a varint (number, kind, value, 0)."""
    while place < end:
        tag, place = _varint(content, place, end)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = _varint(content, place, end)
            yield number, kind, value, 0
            continue
        if kind == _LENGTH:
            length, place = _varint(content, place, end)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise BadPayload(f"not protobuf: field {number} is of kind {kind}")
        if place + length > end:
            raise BadPayload(f"not protobuf: field {number} has {length} bytes, {end - place} are there")
        yield number, kind, place, place + length
        place += length


def _varint(content: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while place < end and shift < 64:
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), place
        shift += 7
    raise BadPayload("not protobuf: a number has no end")
