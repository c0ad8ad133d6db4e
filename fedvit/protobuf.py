"""The wire format of protobuf, as much of it as an ONNX file has.

A device reads and writes ONNX files without the library onnx. A message is a row of fields. It is read only in the one
form in which honest software writes it: protobuf's own readers interpret other forms differently, and a check must
not read a field in another way than the engine.
"""

import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fedvit.errors import BadPayload

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
"""Encodings of a field; groups (3 and 4) are long out of use."""

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_NUMBERS = range(1, 2**29)
"""A tag has 32 bits, three of which say how the field is written. Some readers drop bits beyond them."""


class Field(NamedTuple):
    number: int
    kind: int
    value: int  # of a varint, as it is written: without sign
    message: bytes | mmap.mmap  # where it was found; what it holds, of every kind but a varint, is there from ...
    begin: int
    end: int

    @property
    def content(self) -> bytes:
        return self.message[self.begin : self.end]

    @property
    def signed(self) -> int:
        return _to_signed(self.value)

    @property
    def text(self) -> str:
        return self.content.decode()

    def encode(self) -> bytes:
        """The field as it came."""
        tag = varint(self.number << 3 | self.kind)
        if self.kind == VARINT:
            return tag + varint(self.value)
        return tag + (varint(self.end - self.begin) if self.kind == LENGTH else b"") + self.content


def fields(message: bytes | mmap.mmap, begin: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message that lies from `begin` to `end`, in their order; what they hold is not copied.

    Raises BadPayload when the bytes are no message, or one that is written in another form than the shortest.
    """
    place, end = begin, len(message) if end is None else end
    while place < end:
        tag, place = _varint_at(message, place, end)
        number, kind = tag >> 3, tag & 7
        if number not in _NUMBERS:
            raise BadPayload("FV2307", f"not protobuf: a field has number {number}, expected 1 to {_NUMBERS[-1]}")
        if kind == VARINT:
            value, place = _varint_at(message, place, end)
            yield Field(number, kind, value, message, place, place)
            continue
        if kind == LENGTH:
            length, place = _varint_at(message, place, end)
        elif kind in _FIXED_BYTES:
            length = _FIXED_BYTES[kind]
        else:
            raise BadPayload("FV2307", f"not protobuf: field {number} is of kind {kind}")
        if length > end - place:
            raise BadPayload("FV2307", f"not protobuf: field {number} has {length} bytes, {end - place} are there")
        yield Field(number, kind, 0, message, place, place + length)
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
    """Encode the start of a field whose `length` bytes are written piece by piece."""
    return varint(number << 3 | LENGTH) + varint(length)


def integers(entries: Iterable[Field]) -> tuple[int, ...]:
    """The whole numbers of a repeated field, each by itself or packed."""
    found: list[int] = []
    for field in entries:
        if field.kind == VARINT:
            found.append(field.signed)
            continue
        place = field.begin
        while place < field.end:
            value, place = _varint_at(field.message, place, field.end)
            found.append(_to_signed(value))
    return tuple(found)


def _to_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _varint_at(message: bytes | mmap.mmap, place: int, end: int) -> tuple[int, int]:
    """(value, the place after it)."""
    if place < end and (first := message[place]) < 0x80:  # nearly always
        return first, place + 1
    begin, value = place, 0
    while place < end:
        byte = message[place]
        value |= (byte & 0x7F) << 7 * (place - begin)
        place += 1
        if byte < 0x80:
            if value >= 2**64 or byte == 0:
                raise BadPayload(
                    "FV2307", f"not protobuf: the number at byte {begin} is not written in its shortest form"
                )
            return value, place
        if place - begin == 10:
            break
    raise BadPayload("FV2307", f"not protobuf: the number at byte {begin} does not end")
