"""Read and write ONNX models: a list of nodes with inputs, outputs and constants that can be exchanged.

Devices have no onnx package. Field numbers are those of onnx.proto; other fields stay unchanged.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedvit.errors import BadPayload, ConfigError
from fedvit.protobuf import FIXED32, Field, bytes_field, fields, integers, length_prefix, number_field, varint
from fedvit.tensors import Array

Shape = tuple[int, ...]
Numbers = tuple[float, ...]
Parts = list[bytes | memoryview]
"""The pieces of a file, so that weights are written without a copy."""

MAX_BYTES = 2**31 - 1
"""Protobuf's limit: no library reads a larger file."""
MAX_SMALL_BYTES = 64
"""Size of the largest constant that `read_numbers` decodes."""

FLOAT, UINT8, INT8, INT64, FLOAT16 = 1, 2, 3, 7, 10
_CODES = {"float32": FLOAT, "uint8": UINT8, "int8": INT8, "int64": INT64, "float16": FLOAT16}

_MODEL_GRAPH, _MODEL_OPSET, _MODEL_METADATA = 7, 8, 14
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE = 1, 5, 11, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_KIND, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_TENSOR = 1, 2, 3, 5
_ATTRIBUTE_INTS, _ATTRIBUTE_TYPE = 8, 20
_TYPE_FLOAT, _TYPE_INT, _TYPE_INTS = 1, 2, 7
_TENSOR_DIMS, _TENSOR_DTYPE, _TENSOR_INT64, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 7, 8, 9


@dataclass(frozen=True, eq=False)
class Node:
    """An operator; `rest` holds its name, attributes and domain."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rest: bytes = b""

    @cached_property
    def operator(self) -> str:
        """The kind, with its domain unless that is ONNX's own."""
        domains = [part.text for part in fields(self.rest) if part.number == _NODE_DOMAIN]
        return ".".join((*filter(None, domains), self.kind))

    @cached_property
    def attributes(self) -> dict[str, Numbers]:
        """The values of all attributes that are numbers or small tensors; empty tuples for other attributes."""
        return dict(_read_attribute(part.content) for part in fields(self.rest) if part.number == _NODE_ATTRIBUTE)

    def integers(self, name: str) -> Shape | None:
        """Return an attribute that is an integer or a list of them; None if the node has no attribute of that name."""
        return tuple(map(int, self.attributes[name])) if name in self.attributes else None

    def integer(self, name: str, default: int) -> int:
        values = self.integers(name)
        return values[0] if values else default


@dataclass(frozen=True)
class Port:
    """An input or output. A text in the shape names a length that is known only when the model runs."""

    dtype: int
    shape: tuple[int | str, ...] | None  # None: the file does not say


@dataclass(frozen=True)
class Model:
    nodes: tuple[Node, ...]
    constants: Mapping[str, bytes]  # encoded tensors
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    values: Mapping[str, bytes]  # encoded types and shapes of intermediate values
    rest: bytes  # of the model: versions, operator sets, producer
    graph_rest: bytes

    def find_shape(self, name: str) -> Shape | None:
        """Return the shape of a value; None if the graph does not define it or leaves a length open."""
        port = self.outputs.get(name) or self.inputs.get(name)
        if port is None and name in self.values:
            port = _read_port(self.values[name])[1]
        if port is not None:
            lengths = tuple(length for length in port.shape or () if isinstance(length, int))
            return lengths if port.shape is not None and len(lengths) == len(port.shape) else None
        if name in self.constants:
            return integers(part for part in fields(self.constants[name]) if part.number == _TENSOR_DIMS)
        return None

    def shape(self, name: str) -> Shape:
        """Return the shape of a value. Raises BadPayload if the graph does not define it."""
        if (shape := self.find_shape(name)) is None:
            raise BadPayload("FV2310", f"the graph does not define the shape of {name!r}")
        return shape

    def dtype(self, name: str) -> int | None:
        """Return the code of a value's dtype; None if the graph does not tell."""
        port = self.outputs.get(name) or self.inputs.get(name)
        if port is None and name in self.values:
            port = _read_port(self.values[name])[1]
        return port.dtype if port else None

    def with_operators_of(self, domain: str) -> "Model":
        """Return the model with version 1 of another set of operators."""
        opset = bytes_field(1, domain) + number_field(2, 1)
        return replace(self, rest=self.rest + bytes_field(_MODEL_OPSET, opset))


def make_node(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: float | Sequence[int]
) -> Node:
    """Return a new node, named after its first output."""
    rest = bytes_field(_NODE_NAME, outputs[0])
    for name, value in attributes.items():
        encoded = bytes_field(_ATTRIBUTE_NAME, name)
        if isinstance(value, float):
            encoded += varint(_ATTRIBUTE_FLOAT << 3 | FIXED32) + struct.pack("<f", value)
            encoded += number_field(_ATTRIBUTE_TYPE, _TYPE_FLOAT)
        elif isinstance(value, int):
            encoded += number_field(_ATTRIBUTE_INT, value) + number_field(_ATTRIBUTE_TYPE, _TYPE_INT)
        else:
            encoded += b"".join(number_field(_ATTRIBUTE_INTS, number) for number in value)
            encoded += number_field(_ATTRIBUTE_TYPE, _TYPE_INTS)
        rest += bytes_field(_NODE_ATTRIBUTE, encoded)
    if domain:
        rest += bytes_field(_NODE_DOMAIN, domain)
    return Node(kind, tuple(inputs), tuple(outputs), rest)


def read_model(content: bytes) -> Model:
    """Read an ONNX file. Raises BadPayload if the bytes are not a model."""
    graph, rest = b"", b""
    for field in fields(content):
        if field.number == _MODEL_GRAPH:
            graph = field.content
        else:
            rest += field.encode()
    if not graph:
        raise BadPayload("FV2307", f"{len(content)} bytes are not an ONNX model: they have no graph")
    nodes: list[Node] = []
    constants: dict[str, bytes] = {}
    ports: dict[int, dict[str, Port]] = {_GRAPH_INPUT: {}, _GRAPH_OUTPUT: {}}
    values: dict[str, bytes] = {}
    graph_rest = b""
    for field in fields(graph):
        if field.number == _GRAPH_NODE:
            nodes.append(_read_node(field.content))
        elif field.number == _GRAPH_INITIALIZER:
            constants[_one(field.content, _TENSOR_NAME).text] = field.content
        elif field.number == _GRAPH_VALUE:
            values[_one(field.content, 1).text] = field.content
        elif field.number in ports:
            name, port = _read_port(field.content)
            ports[field.number][name] = port
        else:
            graph_rest += field.encode()
    return Model(tuple(nodes), constants, ports[_GRAPH_INPUT], ports[_GRAPH_OUTPUT], values, rest, graph_rest)


def write_model(model: Model, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Parts:
    """Encode a model whose constants are its own and `tensors`.

    Raises ConfigError if the file would be larger than protobuf allows.
    """
    parts: Parts = [bytes_field(_GRAPH_NODE, _write_node(entry)) for entry in model.nodes]
    parts.append(model.graph_rest)
    parts += [bytes_field(_GRAPH_INITIALIZER, content) for content in model.constants.values()]
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        head = _tensor_head(name, array) + length_prefix(_TENSOR_RAW, raw.nbytes)
        parts += [length_prefix(_GRAPH_INITIALIZER, len(head) + raw.nbytes) + head, raw]
    for number, ports in ((_GRAPH_INPUT, model.inputs), (_GRAPH_OUTPUT, model.outputs)):
        parts += [bytes_field(number, _write_port(name, port)) for name, port in ports.items()]
    parts += [bytes_field(_GRAPH_VALUE, content) for content in model.values.values()]
    entries = [bytes_field(1, name) + bytes_field(2, text) for name, text in metadata.items()]
    tail = b"".join(bytes_field(_MODEL_METADATA, entry) for entry in entries)
    parts = [model.rest + length_prefix(_MODEL_GRAPH, size_bytes(parts)), *parts, tail]
    if size_bytes(parts) > MAX_BYTES:
        raise ConfigError(
            "FV1906",
            f"the model takes {size_bytes(parts)} bytes in one ONNX file, which may have at most {MAX_BYTES}; "
            "choose a smaller precision with --precision",
        )
    return parts


def size_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)


def encode_constant(name: str, array: Array) -> bytes:
    """Encode a small tensor."""
    return _tensor_head(name, array) + bytes_field(_TENSOR_RAW, array.tobytes())


def read_integers(tensor: bytes) -> tuple[int, ...]:
    """Return the values of a constant of dtype int64. Raises BadPayload for another dtype."""
    if _one(tensor, _TENSOR_DTYPE).value != INT64:
        raise BadPayload("FV2310", f"constant {_one(tensor, _TENSOR_NAME).text!r} does not hold integers of 64 bits")
    raw = [field.content for field in fields(tensor) if field.number == _TENSOR_RAW]
    if raw:
        return tuple(np.frombuffer(raw[0], "<i8").tolist())
    return integers(field for field in fields(tensor) if field.number == _TENSOR_INT64)


def read_numbers(tensor: bytes) -> Numbers | None:
    """Return the values of a small constant of float32 or int64, or the one value of equal bytes; None for others."""
    dtype, raw = 0, b""
    for part in fields(tensor):
        if part.number == _TENSOR_DTYPE:
            dtype = part.value
        elif part.number == _TENSOR_RAW:
            raw = part.content
    if dtype in (UINT8, INT8) and len(set(raw)) == 1:
        return (raw[0],)
    form = {FLOAT: "f", INT64: "q"}.get(dtype)
    if form is None or len(raw) % struct.calcsize(form) or len(raw) > MAX_SMALL_BYTES:
        return None
    return struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw)


def rename_value(model: Model, before: str, after: str) -> Model:
    """Return the same model with another name for a value."""

    def swap(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(after if name == before else name for name in names)

    nodes = tuple(replace(entry, inputs=swap(entry.inputs), outputs=swap(entry.outputs)) for entry in model.nodes)
    return replace(model, nodes=nodes)


def _read_attribute(content: bytes) -> tuple[str, Numbers]:
    name, numbers = "", list[Field]()
    for part in fields(content):
        if part.number == _ATTRIBUTE_NAME:
            name = part.text
        elif part.number == _ATTRIBUTE_FLOAT:
            return name, struct.unpack("<f", part.content)
        elif part.number == _ATTRIBUTE_TENSOR:
            return name, read_numbers(part.content) or ()
        elif part.number in (_ATTRIBUTE_INT, _ATTRIBUTE_INTS):
            numbers.append(part)
    return name, integers(numbers)


def _read_node(content: bytes) -> Node:
    inputs, outputs, kind, rest = [], [], "", b""
    for field in fields(content):
        if field.number == _NODE_INPUT:
            inputs.append(field.text)
        elif field.number == _NODE_OUTPUT:
            outputs.append(field.text)
        elif field.number == _NODE_KIND:
            kind = field.text
        else:
            rest += field.encode()
    return Node(kind, tuple(inputs), tuple(outputs), rest)


def _write_node(entry: Node) -> bytes:
    names = [bytes_field(_NODE_INPUT, name) for name in entry.inputs]
    names += [bytes_field(_NODE_OUTPUT, name) for name in entry.outputs]
    return b"".join(names) + bytes_field(_NODE_KIND, entry.kind) + entry.rest


def _read_port(content: bytes) -> tuple[str, Port]:
    name = _one(content, 1).text
    tensor = _one(_one(content, 2).content, 1).content  # only tensors have a place in our graphs
    lengths: list[int | str] | None = None
    for shape in fields(tensor):
        if shape.number == 2:
            lengths = []
            for dimension in fields(shape.content):
                values = [field for field in fields(dimension.content) if field.number in (1, 2)]
                lengths.append("" if not values else values[0].signed if values[0].number == 1 else values[0].text)
    return name, Port(_one(tensor, 1).value, None if lengths is None else tuple(lengths))


def _write_port(name: str, port: Port) -> bytes:
    tensor = number_field(1, port.dtype)
    if port.shape is not None:
        dimensions = [number_field(1, n) if isinstance(n, int) else bytes_field(2, n) for n in port.shape]
        tensor += bytes_field(2, b"".join(bytes_field(1, dimension) for dimension in dimensions))
    return bytes_field(1, name) + bytes_field(2, bytes_field(1, tensor))


def _tensor_head(name: str, array: Array) -> bytes:
    if str(array.dtype) not in _CODES:
        raise BadPayload("FV2310", f"tensor {name!r} of dtype {array.dtype} is not supported in a bundle")
    dims = b"".join(number_field(_TENSOR_DIMS, length) for length in array.shape)
    return dims + number_field(_TENSOR_DTYPE, _CODES[str(array.dtype)]) + bytes_field(_TENSOR_NAME, name)


def _one(message: bytes, number: int) -> Field:
    for field in fields(message):
        if field.number == number:
            return field
    raise BadPayload("FV2307", f"not an ONNX model: field {number} is missing")
