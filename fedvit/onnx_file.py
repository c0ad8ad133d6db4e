"""Checks an ONNX file before the engine opens it: refuses files that could make the engine read another file.

The location of a weight may be a file beside the graph; onnxruntime opens that file, and versions before 1.25 also
where it lies outside the graph's folder (docs/threat-model.md). Execution providers have operators that name files.
Graphs of fedvit have neither, so a file is accepted only if it consists of fields and operators that they use.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedvit.errors import BadPayload
from fedvit.kernels import DOMAIN, EXTRA
from fedvit.protobuf import FIXED32, FIXED64, LENGTH, VARINT, fields


class _Known(NamedTuple):
    """A field that our graphs have."""

    kinds: tuple[int, ...]  # how it may be written: repeated numbers each by itself, or packed
    repeated: bool = False
    message: str = ""  # type of the content, if that is checked

    @property
    def many(self) -> "_Known":
        return self._replace(repeated=True)


def _message(name: str) -> _Known:
    return _Known((LENGTH,), message=name)


_NUMBER, _FLOAT, _BYTES = _Known((VARINT,)), _Known((FIXED32,)), _Known((LENGTH,))
_NUMBERS = _Known((VARINT, LENGTH), repeated=True)
_FLOATS = _Known((FIXED32, LENGTH), repeated=True)
_DOUBLES = _Known((FIXED64, LENGTH), repeated=True)

# By message of onnx.proto its fields. What is missing cannot be in a file: external data, graphs in attributes, sparse
# tensors, functions, training information, and all that later versions of ONNX may add. Where neither a node nor a
# tensor can be inside, nothing is looked into.
_KNOWN: Mapping[str, Mapping[int, _Known]] = {
    "model": {
        1: _NUMBER,  # ir_version
        2: _BYTES,  # producer_name
        3: _BYTES,  # producer_version
        4: _BYTES,  # domain
        5: _NUMBER,  # model_version
        6: _BYTES,  # doc_string
        7: _message("graph"),
        8: _BYTES.many,  # opset_import
        14: _message("metadata").many,
    },
    "metadata": {1: _BYTES, 2: _BYTES},  # key, value
    "graph": {
        1: _message("node").many,
        2: _BYTES,  # name
        5: _message("tensor").many,
        10: _BYTES,  # doc_string
        11: _BYTES.many,  # input: names, types and shapes, like the next two
        12: _BYTES.many,  # output
        13: _BYTES.many,  # value_info
    },
    "node": {
        1: _BYTES.many,  # inputs
        2: _BYTES.many,  # outputs
        3: _BYTES,  # name
        4: _BYTES,  # op_type
        5: _message("attribute").many,
        6: _BYTES,  # doc_string
        7: _BYTES,  # domain
    },
    "attribute": {
        1: _BYTES,  # name
        2: _FLOAT,
        3: _NUMBER,
        4: _BYTES,  # a text
        5: _message("tensor"),
        7: _FLOATS,
        8: _NUMBERS,
        9: _BYTES.many,  # texts
        13: _BYTES,  # doc_string
        20: _NUMBER,  # type
    },
    "tensor": {
        1: _NUMBERS,  # dims
        2: _NUMBER,  # data_type
        4: _FLOATS,
        5: _NUMBERS,  # int32_data
        7: _NUMBERS,  # int64_data
        8: _BYTES,  # name
        9: _BYTES,  # raw_data
        10: _DOUBLES,
        11: _NUMBERS,  # uint64_data
        12: _BYTES,  # doc_string
    },
}
_GRAPH = 7
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_OP_TYPE, _DOMAIN = 4, 7
_METADATA_KEY = 1

_MICROSOFT = frozenset({b"MatMulIntegerToFloat"})
"""The operators of onnxruntime's own set that export makes."""
_NAMES_A_FILE = b"EPContext"
"""An execution provider's operator: it names a file with a compiled graph. Some providers do not look at its set."""
_SESSION_OPTIONS = b"ort_config"
"""Options that onnxruntime takes from a model where its owner allows that; one of them makes it write files."""
_FLATBUFFER = b"ORTM"
"""From byte 4 on in onnxruntime's own format, which it recognises by that."""


def check_self_contained(source: Path | bytes) -> None:
    """Raise BadPayload if a file is not an ONNX model, or has anything that fedvit's graphs do not have.

    Weights are skipped without reading them, so that this takes milliseconds for a graph of any size.
    """
    name = "a graph" if isinstance(source, bytes) else f"graph {source.name}"
    try:
        if isinstance(source, bytes):
            _check_model(source)
            return
        with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check_model(content)
    except ValueError:  # an empty file cannot be mapped
        raise BadPayload("FV2306", f"{name} is empty") from None
    except BadPayload as error:
        raise BadPayload("FV2306", f"{name} is refused: {error}") from None


def _check_model(content: bytes | mmap.mmap) -> None:
    if content[4:8] == _FLATBUFFER:
        raise BadPayload("FV2306", "it is in onnxruntime's own format, expected ONNX")
    if _GRAPH not in _check(content, 0, len(content), "model"):
        raise BadPayload("FV2306", "it holds no graph")


def _check(content: bytes | mmap.mmap, begin: int, end: int, what: str) -> set[int]:
    """Look through one message and all that is in it; the numbers of its fields that are there at most once.

    No message of `_KNOWN` can hold one of its own kind, so that nothing is nested deep.
    """
    known, seen = _KNOWN[what], set[int]()
    operator = domain = b""
    for field in fields(content, begin, end):
        number = field.number
        if (allowed := known.get(number)) is None:
            if what == "tensor" and number in (_EXTERNAL_DATA, _DATA_LOCATION):
                raise BadPayload("FV2306", "a tensor lies in another file")
            raise BadPayload("FV2306", f"it has field {number} of message {what!r}, which fedvit's graphs do not have")
        if field.kind not in allowed.kinds:
            raise BadPayload("FV2306", f"not ONNX: field {number} of message {what!r} is of kind {field.kind}")
        if not allowed.repeated:
            if number in seen:
                raise BadPayload("FV2306", f"not ONNX: field {number} of message {what!r} is there twice")
            seen.add(number)
        if allowed.message:
            _check(content, field.begin, field.end, allowed.message)
        elif what == "node":
            if number == _OP_TYPE:
                operator = field.content
            elif number == _DOMAIN:
                domain = field.content
        elif what == "metadata" and number == _METADATA_KEY and field.content == _SESSION_OPTIONS:
            raise BadPayload("FV2306", f"its metadata have {_SESSION_OPTIONS.decode()}, options for the engine")
    if what == "node" and (operator == _NAMES_A_FILE or (domain and not _is_ours(domain, operator))):
        called = f"{domain.decode(errors='replace')}.{operator.decode(errors='replace')}".lstrip(".")
        if domain == DOMAIN.encode():
            raise BadPayload(
                "FV2305",
                f"it has an operator {called!r} of {EXTRA}, expected operators of ONNX: a device with {EXTRA} puts its "
                "own in itself",
            )
        raise BadPayload("FV2306", f"it has an operator {called!r}, which fedvit's graphs do not have")
    return seen


def _is_ours(domain: bytes, operator: bytes) -> bool:
    return domain == b"com.microsoft" and operator in _MICROSOFT
