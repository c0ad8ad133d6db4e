"""An ONNX model as a list of nodes with inputs, outputs and constants that can be exchanged.

Field numbers are those of onnx.proto. Other fields are kept unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedvit.errors import BadPayload, ConfigError
from fedvit.protobuf import Field, bytes_field, fields, integers, length_prefix, number_field
from fedvit.tensors import Array

Shape = tuple[int, ...]
Parts = list[bytes | memoryview]
"""The pieces of a file, so that weights are written without a copy."""

MAX_BYTES = 2**31 - 1
"""Protobuf's limit: no library reads a larger file."""

FLOAT, INT8, INT64, FLOAT16 = 1, 3, 7, 10
_CODES = {"float32": FLOAT, "int8": INT8, "int64": INT64, "float16": FLOAT16}

_MODEL_GRAPH, _MODEL_METADATA = 7, 14
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE = 1, 5, 11, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _NODE_KIND, _NODE_ATTRIBUTE = 1, 2, 4, 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_INTS, _ATTRIBUTE_TYPE = 1, 3, 8, 20
_TYPE_INT, _TYPE_INTS = 2, 7
_TENSOR_DIMS, _TENSOR_DTYPE, _TENSOR_INT64, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 7, 8, 9


@dataclass(frozen=True)
class Node:
    """One operator; `rest` holds its name and attributes."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rest: bytes = b""

    def numbers(self, name: str) -> Shape | None:
        """An attribute that is a whole number or a list of them; None when the node has none of that name."""
        for attribute in fields(self.rest):
            if attribute.number != _NODE_ATTRIBUTE:
                continue
            parts = [*fields(attribute.content)]
            if any(part.number == _ATTRIBUTE_NAME and part.text == name for part in parts):
                return integers(part for part in parts if part.number in (_ATTRIBUTE_INT, _ATTRIBUTE_INTS))
        return None

    def number(self, name: str, default: int) -> int:
        found = self.numbers(name)
        return found[0] if found else default


@dataclass(frozen=True)
class Port:
    """An input or output: a text in the shape names a length that is known only when the model runs."""

    dtype: int
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Model:
    nodes: tuple[Node, ...]
    constants: Mapping[str, bytes]  # encoded tensors
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    shapes: Mapping[str, Shape]  # of intermediate values
    rest: bytes  # of the model: versions, operator sets, who made it
    graph_rest: bytes

    def shape(self, name: str) -> Shape:
        """Raises BadPayload when the graph does not define it."""
        if name not in self.shapes:
            raise BadPayload(f"the graph does not define the shape of {name!r}")
        return self.shapes[name]


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: int | Sequence[int]) -> Node:
    """A new node, named after its first output."""
    rest = bytes_field(3, outputs[0])
    for name, value in attributes.items():
        described = bytes_field(_ATTRIBUTE_NAME, name)
        if isinstance(value, int):
            described += number_field(_ATTRIBUTE_INT, value) + number_field(_ATTRIBUTE_TYPE, _TYPE_INT)
        else:
            described += b"".join(number_field(_ATTRIBUTE_INTS, number) for number in value)
            described += number_field(_ATTRIBUTE_TYPE, _TYPE_INTS)
        rest += bytes_field(_NODE_ATTRIBUTE, described)
    return Node(kind, tuple(inputs), tuple(outputs), rest)


def read_model(content: bytes) -> Model:
    """Raises BadPayload when the bytes are no ONNX model."""
    graph, rest = b"", b""
    for field in fields(content):
        if field.number == _MODEL_GRAPH:
            graph = field.content
        else:
            rest += field.encoded()
    if not graph:
        raise BadPayload(f"{len(content)} bytes are no ONNX model: no graph is in them")
    nodes: list[Node] = []
    constants: dict[str, bytes] = {}
    ports: dict[int, dict[str, Port]] = {_GRAPH_INPUT: {}, _GRAPH_OUTPUT: {}, _GRAPH_VALUE: {}}
    shapes: dict[str, Shape] = {}
    graph_rest = b""
    for field in fields(graph):
        if field.number == _GRAPH_NODE:
            nodes.append(_read_node(field.content))
        elif field.number == _GRAPH_INITIALIZER:
            name = _one(field.content, _TENSOR_NAME).text
            constants[name] = field.content
            shapes[name] = integers(part for part in fields(field.content) if part.number == _TENSOR_DIMS)
        elif field.number in ports:
            name, port = _read_port(field.content)
            ports[field.number][name] = port
        else:
            graph_rest += field.encoded()
    for name, port in {**ports[_GRAPH_VALUE], **ports[_GRAPH_INPUT], **ports[_GRAPH_OUTPUT]}.items():
        if all(isinstance(length, int) for length in port.shape):
            shapes[name] = tuple(length for length in port.shape if isinstance(length, int))
    return Model(tuple(nodes), constants, ports[_GRAPH_INPUT], ports[_GRAPH_OUTPUT], shapes, rest, graph_rest)


def write_model(model: Model, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Parts:
    """The file of a model whose constants are its own and `tensors`.

    Shapes of intermediate values are omitted, as engines infer them. Raises ConfigError when the file
    would be larger than protobuf allows.
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
    entries = [bytes_field(1, name) + bytes_field(2, text) for name, text in metadata.items()]
    tail = b"".join(bytes_field(_MODEL_METADATA, entry) for entry in entries)
    parts = [model.rest + length_prefix(_MODEL_GRAPH, size_bytes(parts)), *parts, tail]
    if size_bytes(parts) > MAX_BYTES:
        raise ConfigError(
            f"the model takes {size_bytes(parts)} bytes in one ONNX file, which may have at most {MAX_BYTES}; "
            "choose a smaller precision with --precision"
        )
    return parts


def size_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)


def constant(name: str, array: Array) -> bytes:
    """A small tensor as it is written."""
    return _tensor_head(name, array) + bytes_field(_TENSOR_RAW, array.tobytes())


def whole_numbers(tensor: bytes) -> tuple[int, ...]:
    """The values of a constant of dtype int64. Raises BadPayload for any other."""
    if _one(tensor, _TENSOR_DTYPE).value != INT64:
        raise BadPayload(f"constant {_one(tensor, _TENSOR_NAME).text!r} does not hold whole numbers")
    raw = [field.content for field in fields(tensor) if field.number == _TENSOR_RAW]
    if raw:
        return tuple(np.frombuffer(raw[0], "<i8").tolist())
    return integers(field for field in fields(tensor) if field.number == _TENSOR_INT64)


def renamed(model: Model, before: str, after: str) -> Model:
    """The same model with another name for a value."""

    def swap(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(after if name == before else name for name in names)

    nodes = tuple(replace(entry, inputs=swap(entry.inputs), outputs=swap(entry.outputs)) for entry in model.nodes)
    return replace(model, nodes=nodes)


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
            rest += field.encoded()
    return Node(kind, tuple(inputs), tuple(outputs), rest)


def _write_node(entry: Node) -> bytes:
    names = [bytes_field(_NODE_INPUT, name) for name in entry.inputs]
    names += [bytes_field(_NODE_OUTPUT, name) for name in entry.outputs]
    return b"".join(names) + bytes_field(_NODE_KIND, entry.kind) + entry.rest


def _read_port(content: bytes) -> tuple[str, Port]:
    name = _one(content, 1).text
    tensor = _one(_one(content, 2).content, 1).content  # only tensors have a place in our graphs
    lengths: list[int | str] = []
    for shape in fields(tensor):
        if shape.number == 2:
            for dimension in fields(shape.content):
                known = [field for field in fields(dimension.content) if field.number in (1, 2)]
                lengths.append("" if not known else known[0].signed if known[0].number == 1 else known[0].text)
    return name, Port(_one(tensor, 1).value, tuple(lengths))


def _write_port(name: str, port: Port) -> bytes:
    dimensions = [number_field(1, n) if isinstance(n, int) else bytes_field(2, n) for n in port.shape]
    shape = b"".join(bytes_field(1, dimension) for dimension in dimensions)
    tensor = number_field(1, port.dtype) + bytes_field(2, shape)
    return bytes_field(1, name) + bytes_field(2, bytes_field(1, tensor))


def _tensor_head(name: str, array: Array) -> bytes:
    if str(array.dtype) not in _CODES:
        raise BadPayload(f"tensor {name!r} of dtype {array.dtype} is not supported in a bundle")
    dims = b"".join(number_field(_TENSOR_DIMS, length) for length in array.shape)
    return dims + number_field(_TENSOR_DTYPE, _CODES[str(array.dtype)]) + bytes_field(_TENSOR_NAME, name)


def _one(message: bytes, number: int) -> Field:
    for field in fields(message):
        if field.number == number:
            return field
    raise BadPayload(f"not an ONNX model: field {number} is missing")
