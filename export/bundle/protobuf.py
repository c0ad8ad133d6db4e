"""The wire format of protobuf, as much of it as an ONNX file has.

A device makes ONNX files without the library onnx, so it reads and writes their fields itself. A message is
a row of fields; what a reader does not know it can put back as it came.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fedvit.errors import BadPayload

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""How a field is written; groups (3 and 4) are long out of use."""

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


class Field(NamedTuple):
    number: int
    kind: int
    value: int  # of a varint, as it is written: without sign
    content: bytes  # of every other kind

    @property
    def signed(self) -> int:
        return self.value - 2**64 if self.value >= 2**63 else self.value

    @property
    def text(self) -> str:
        return self.content.decode()

    def encoded(self) -> bytes:
        """The field as it came."""
        tag = varint(self.number << 3 | self.kind)
        if self.kind == VARINT:
            return tag + varint(self.value)
        return tag + (varint(len(self.content)) if self.kind == LENGTH else b"") + self.content


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message in their order. Raises BadPayload when the bytes are none."""
    place = 0
    while place < len(message):
        tag, place = _varint_at(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, place = _varint_at(message, place)
            yield Field(number, kind, value, b"")
            continue
        if kind == LENGTH:
            length, place = _varint_at(message, place)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise BadPayload(f"not protobuf: field {number} is of kind {kind}")
        content = message[place : place + length]
        if len(content) < length:
            raise BadPayload(f"not protobuf: field {number} has {length} bytes, {len(content)} are there")
        yield Field(number, kind, 0, content)
        place += length


def varint(value: int) -> bytes:
    """A whole number, seven bits a byte, low bits first; a negative one as 64 bits.

    >>> varint(300).hex(), len(varint(-1))
    ('ac02', 10)
    """
    value &= 2**64 - 1
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, content: bytes | str) -> bytes:
    """A text, a message or raw bytes."""
    raw = content.encode() if isinstance(content, str) else content
    return length_prefix(number, len(raw)) + raw


def length_prefix(number: int, length: int) -> bytes:
    """What stands before the `length` bytes of a field that is written piece by piece."""
    return varint(number << 3 | LENGTH) + varint(length)


def integers(entries: Iterable[Field]) -> tuple[int, ...]:
    """The whole numbers of a repeated field, each by itself or packed."""
    found: list[int] = []
    for field in entries:
        if field.kind == VARINT:
            found.append(field.signed)
            continue
        place = 0
        while place < len(field.content):
            value, place = _varint_at(field.content, place)
            found.append(Field(field.number, VARINT, value, b"").signed)
    return tuple(found)


def _varint_at(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 2**64 - 1, place
        shift += 7
    raise BadPayload(f"not protobuf: a number at byte {place} does not end")
