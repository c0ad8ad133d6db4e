"""The nodes of an ONNX file, as the search for patterns sees them."""

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedvit.protobuf import Field, fields, integers

NODE, INITIALIZER, _INPUT, _OUTPUT, _BETWEEN = 1, 5, 11, 12, 13  # fields of a graph
_FLOAT, _BYTES, _INTEGER = 1, (2, 3), 7  # types of a tensor
REPEATED = "ConstantOfShape"  # makes a tensor of one number

Numbers = tuple[float, ...]


@dataclass(eq=False)
class Node:
    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Numbers]  # of numbers alone
    encoded: bytes
    place: int


@dataclass
class Nodes:
    """Nodes in their order, and who makes and who reads a tensor."""

    all: list[Node]
    constants: dict[str, Numbers]
    kept: set[str]  # outputs of the graph
    described: dict[str, bytes]  # type and shape of other tensors
    makers: dict[str, Node] = field(default_factory=dict)
    readers: dict[str, list[Node]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for node in self.all:
            self.makers |= dict.fromkeys(node.outputs, node)
            if node.kind == REPEATED:
                self.constants |= dict.fromkeys(node.outputs, node.attributes.get("value", (0.0,)))
            for name in node.inputs:
                self.readers[name].append(node)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """What the graph says of a tensor that is no constant; None if it says nothing."""
        content = self.described.get(name, b"")
        for number in (2, 1, 2):  # type, of a tensor, shape
            content = next((part.content for part in fields(content) if part.number == number), b"")
        lengths = [part for axis in fields(content) for part in fields(axis.content) if part.number == 1]
        return tuple(part.value for part in lengths) if content else None


def read_nodes(entries: Sequence[Field]) -> Nodes:
    """Of the fields of a graph."""
    return Nodes(
        [_node(entry, place) for place, entry in enumerate(e for e in entries if e.number == NODE)],
        dict(found for entry in entries if entry.number == INITIALIZER and (found := _constant(entry.content))),
        {_name(entry.content) for entry in entries if entry.number == _OUTPUT},
        {_name(entry.content): entry.content for entry in entries if entry.number in (_INPUT, _OUTPUT, _BETWEEN)},
    )


def tensor_name(content: bytes) -> str:
    return next((part.text for part in fields(content) if part.number == 8), "")


def _name(content: bytes) -> str:
    return next(part.text for part in fields(content) if part.number == 1)


def _node(entry: Field, place: int) -> Node:
    kind, inputs, outputs, attributes = "", list[str](), list[str](), dict[str, Numbers]()
    for part in fields(entry.content):
        if part.number == 1:
            inputs.append(part.text)
        elif part.number == 2:
            outputs.append(part.text)
        elif part.number == 4:
            kind = part.text + kind
        elif part.number == 5:
            attributes |= [_attribute(part.content)]
        elif part.number == 7 and part.text:
            kind = f"{kind} of {part.text}"  # an operator of another set
    return Node(kind, inputs, outputs, attributes, entry.content, place)


def _attribute(content: bytes) -> tuple[str, Numbers]:
    name, numbers, tensor = "", list[Field](), None
    for part in fields(content):
        if part.number == 1:
            name = part.text
        elif part.number == 2:
            return name, struct.unpack("<f", part.content)
        elif part.number == 5:
            tensor = _constant(part.content)
        elif part.number in (3, 8):
            numbers.append(part)
    return name, tensor[1] if tensor else integers(numbers)


def _constant(content: bytes) -> tuple[str, Numbers] | None:
    """Name and numbers of a small tensor of floats or whole numbers, as export writes it; of bytes that are all equal
    one of them.
    """
    kind, name, raw = 0, "", b""
    for part in fields(content):
        if part.number == 2:
            kind = part.value
        elif part.number == 8:
            name = part.text
        elif part.number == 9:
            raw = part.content
    if kind in _BYTES and len(set(raw)) == 1:
        return name, (raw[0],)
    form = {_FLOAT: "f", _INTEGER: "q"}.get(kind)
    if form is None or len(raw) % struct.calcsize(form) or len(raw) > 64:
        return None
    return name, struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw)
