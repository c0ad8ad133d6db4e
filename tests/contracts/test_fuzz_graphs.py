"""The check of graphs refuses every graph in which protobuf reads the name of a file.

Valid graphs get a hostile element somewhere and are encoded in unusual ways. The check reads them, and so do both
readers of protobuf: that of its Python package, and that of C++, which the engine also uses.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple, cast

import onnx
import onnx.inliner
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from fedvit.errors import BadPayload
from fedvit.onnx_file import check_self_contained
from fedvit.protobuf import FIXED32, FIXED64, LENGTH, VARINT, varint
from profiles.probes.speed import GRAPHS
from tests.support.disguised_graphs import disguise, make_model
from tests.support.mutations import damage_bytes

pytestmark = pytest.mark.slow

# --- what is hostile ----------------------------------------------------------------------------------


def _make_external(random: Random) -> TensorProto:
    """Make a tensor with external data; sometimes with only one of the two fields that declare it."""
    tensor = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[4])
    half = random.random()
    if half < 0.9:
        for key, value in (("location", "beside.bin"), ("offset", "0"), ("length", "16")):
            tensor.external_data.add(key=key, value=value)
    if half > 0.1:
        tensor.data_location = TensorProto.EXTERNAL
    return tensor


def _make_compiled(random: Random) -> NodeProto:
    domain = random.choice(("", "com.microsoft", "x"))
    node: NodeProto = helper.make_node(
        "EPContext", ["x"], ["v"], domain=domain, ep_cache_context="beside.bin", embed_mode=0
    )
    return node


def _make_inner(random: Random) -> GraphProto:
    if random.random() < 0.5:
        return GraphProto(name="inner", initializer=[_make_external(random)])
    return GraphProto(name="inner", node=[_make_compiled(random)])


def _add_attribute(model: ModelProto, random: Random, **content: Any) -> None:
    random.choice(model.graph.node).attribute.append(AttributeProto(name="hostile", **content))


HOSTILE: dict[str, Callable[[ModelProto, Random], object]] = {
    "nothing": lambda model, random: None,
    "a weight": lambda model, random: model.graph.initializer.append(_make_external(random)),
    "a tensor of a node": lambda model, random: _add_attribute(model, random, t=_make_external(random)),
    "tensors of a node": lambda model, random: _add_attribute(model, random, tensors=[_make_external(random)]),
    "a graph of a node": lambda model, random: _add_attribute(model, random, g=_make_inner(random)),
    "graphs of a node": lambda model, random: _add_attribute(model, random, graphs=[_make_inner(random)]),
    "a sparse weight": lambda model, random: model.graph.sparse_initializer.add().values.CopyFrom(
        _make_external(random)
    ),
    "its indices": lambda model, random: model.graph.sparse_initializer.add().indices.CopyFrom(_make_external(random)),
    "a sparse tensor of a node": lambda model, random: _add_attribute(
        model, random, sparse_tensor=onnx.SparseTensorProto(values=_make_external(random))
    ),
    "sparse tensors of a node": lambda model, random: _add_attribute(
        model, random, sparse_tensors=[onnx.SparseTensorProto(indices=_make_external(random))]
    ),
    "a function": lambda model, random: model.functions.add(name="f").node.append(
        NodeProto(op_type="Constant", attribute=[AttributeProto(name="value", t=_make_external(random))])
    ),
    "training": lambda model, random: model.training_info.add().algorithm.CopyFrom(_make_inner(random)),
    "a compiled graph": lambda model, random: model.graph.node.append(_make_compiled(random)),
    "session options": lambda model, random: model.metadata_props.add(key="ort_config", value="{}"),
}

# --- how it is written --------------------------------------------------------------------------------

FORMS = (
    "as protobuf does", "high bits in tags", "long tags", "long lengths", "long numbers", "other kinds", "groups",
    "wrong lengths", "merged", "twice", "moved", "unknown fields", "tags of nothing", "damaged",
)  # fmt: skip


class _Writer:
    """Encodes a message as protobuf does, except for one deviation `form`, in a random share of places."""

    def __init__(self, form: str, random: Random) -> None:
        self._form = form
        self._random = random
        self._share = random.choice((0.02, 0.1, 0.3))

    def message(self, message: Message) -> bytes:
        pieces: list[bytes] = []
        for field, value in message.ListFields():
            for one in value if field.is_repeated else [value]:
                if self._now("merged") and isinstance(one, Message):
                    pieces += [self._field(field, half) for half in _split(one)]
                else:
                    pieces.append(self._field(field, one))
        if self._now("twice") and pieces:
            pieces.append(self._random.choice(pieces))
        if self._form == "moved":
            self._random.shuffle(pieces)
        if self._now("unknown fields"):
            number = self._random.choice((15, 16, 99, 19_000, 2**29 - 1))
            pieces.insert(self._random.randrange(len(pieces) + 1), self._tag(number, LENGTH) + b"\x01x")
        if self._now("tags of nothing"):
            pieces.insert(self._random.randrange(len(pieces) + 1), self._random.choice((b"\0", b"\2\0", b"\4", b"\7")))
        return b"".join(pieces)

    def _field(self, field: FieldDescriptor, value: Any) -> bytes:
        number = field.number
        if field.type == FieldDescriptor.TYPE_FLOAT:
            return self._tag(number, FIXED32) + struct.pack("<f", value)
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            return self._tag(number, FIXED64) + struct.pack("<d", value)
        if not isinstance(value, Message | str | bytes):
            if self._now("other kinds"):
                packed = varint(value)  # as a packed list
                return self._tag(number, LENGTH) + varint(len(packed)) + packed
            return self._tag(number, VARINT) + self._number(value, "long numbers")
        content = self.message(value) if isinstance(value, Message) else _encode(value)
        if self._now("groups"):
            return self._tag(number, 3) + content + self._tag(number, 4)
        if self._now("other kinds"):
            kind = self._random.choice((VARINT, FIXED64, FIXED32))
            return self._tag(number, kind) + varint(len(content)) + content
        length = len(content)
        if self._now("wrong lengths"):
            length = self._random.choice(
                (length + 1, length + 40, max(0, length - 1), 2**31, 2**32 + length, 2**64 - 1)
            )
        return self._tag(number, LENGTH) + self._number(length, "long lengths") + content

    def _tag(self, number: int, kind: int) -> bytes:
        tag = number << 3 | kind
        if self._now("high bits in tags"):
            tag |= 1 << self._random.choice((32, 32, 33, 34, 35, 63))  # beyond 35 bits it takes a sixth byte
        return self._number(tag, "long tags")

    def _number(self, value: int, form: str) -> bytes:
        written = varint(value)
        if not self._now(form) or len(written) > 9:
            return written
        nothing = self._random.randrange(min(3, 10 - len(written)))
        return written[:-1] + bytes([written[-1] | 0x80]) + b"\x80" * nothing + b"\x00"

    def _now(self, form: str) -> bool:
        return form == self._form and self._random.random() < self._share


def _split(message: Message) -> Iterator[Message]:
    """Yield two messages that readers merge into this one: the entries of a repeated field are in one of them."""
    for first in (True, False):
        half = type(message)()
        half.CopyFrom(message)
        for index, (field, _) in enumerate(message.ListFields()):
            if (index % 2 == 0) is not first:
                half.ClearField(field.name)
        yield half


def _encode(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


# --- what protobuf reads ------------------------------------------------------------------------------


def read_all(raw: bytes) -> list[ModelProto]:
    """The messages that protobuf's readers of Python and of C++ decode from the bytes; none where decoding fails."""
    messages: list[ModelProto] = []
    with contextlib.suppress(DecodeError):
        messages.append(ModelProto.FromString(raw))
    with contextlib.suppress(ValueError):
        messages.append(_read_with_cpp(raw))
    return messages


class _Written(NamedTuple):
    """Bytes in place of a message, for functions of onnx that serialize their argument."""

    raw: bytes

    def SerializeToString(self) -> bytes:
        return self.raw


def _read_with_cpp(raw: bytes) -> ModelProto:
    """Read the bytes with onnx's C++ code. Raises ValueError when they are not a message."""
    try:
        return onnx.shape_inference.infer_shapes(raw)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):  # a message, but no sound model
        try:
            return onnx.inliner.inline_local_functions(cast(ModelProto, _Written(raw)))
        except (onnx.checker.ValidationError, RuntimeError):  # it has functions that cannot be inlined
            return ModelProto(functions=[FunctionProto()])


def is_hostile(message: Message) -> bool:
    """Tell whether an engine could read another file because of it, or it has fields that only other readers know.

    Messages that can hold neither a node nor a tensor are skipped.
    """
    if any(_is_hidden(message, unknown.field_number) for unknown in UnknownFieldSet(message)):
        return True
    if isinstance(message, TensorProto) and (message.external_data or message.data_location):
        return True
    if isinstance(message, NodeProto) and message.op_type == "EPContext":
        return True
    if isinstance(message, ModelProto) and (
        message.functions or any(entry.key == "ort_config" for entry in message.metadata_props)
    ):
        return True
    return any(
        is_hostile(one)
        for field, value in message.ListFields()
        if field.message_type is not None and field.message_type.name not in ("ValueInfoProto", "OperatorSetIdProto")
        for one in (value if field.is_repeated else [value])
    )


def _is_hidden(message: Message, number: int) -> bool:
    """Tell whether another reader may understand an unknown field; an unknown value of an enum does not count."""
    field = message.DESCRIPTOR.fields_by_number.get(number)
    return field is None or field.enum_type is None or field.name == "data_location"


# --- tests --------------------------------------------------------------------------------------------

GRAPHS_OF_EACH = 110
HONEST = [
    ModelProto.FromString(file.read_bytes()) for file in sorted(GRAPHS.glob("*.onnx")) if file.stat().st_size < 1000
]
"""The small graphs that fedvit ships; larger ones would only take longer."""


@pytest.mark.parametrize("form", FORMS)
def test_no_graph_is_accepted_that_names_a_file_to_protobuf(form: str) -> None:
    """Hostile graphs in every form that a reader of protobuf may take for something else; valid graphs are accepted."""
    random = Random(form)
    accepted = refused = 0
    for _ in range(GRAPHS_OF_EACH):
        model = ModelProto()
        model.CopyFrom(random.choice(HONEST))
        kind = random.choice([*HOSTILE]) if random.random() < 0.75 else "nothing"
        HOSTILE[kind](model, random)
        raw = _Writer(form, random).message(model)
        if form == "damaged":
            raw = damage_bytes(random, raw, raw)
        hostile = any(is_hostile(message) for message in read_all(raw))
        try:
            check_self_contained(raw)
        except BadPayload:
            refused += hostile
            assert (kind, form) != ("nothing", FORMS[0]), "a valid graph is refused"
            continue
        assert not hostile, f"{kind}: {raw.hex()}"
        accepted += 1
    assert refused > 0, "there is something to find"
    assert accepted > 0


def test_readers_see_a_hidden_file() -> None:
    """A reader drops the bit that hides it, and both readers see nothing hostile in an honest graph."""
    assert any(is_hostile(message) for message in read_all(disguise("beside.bin")))
    honest = read_all(make_model(None))
    assert len(honest) == 2
    assert not any(is_hostile(message) for message in honest)
