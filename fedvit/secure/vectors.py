"""The numbers of a sum: words modulo 2**bits for tensors, and exact integers modulo 2**64 for weights and counts."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedvit.errors import BadPayload
from fedvit.secure.fixed_point import Words

Exact = npt.NDArray[np.uint64]
EXACT_BYTES = 8


class Vector(NamedTuple):
    """The numbers of a device, or of a sum. Addition wraps."""

    words: Words  # (n,)
    exact: Exact  # (m,)

    @classmethod
    def zeros(cls, words: int, exact: int) -> "Vector":
        return cls(np.zeros(words, np.uint32), np.zeros(exact, np.uint64))

    def add(self, other: "Vector", bits: int) -> None:
        """Add another vector in place."""
        np.add(self.words, other.words, out=self.words)
        if bits < 32:
            self.words[:] &= np.uint32((1 << bits) - 1)
        np.add(self.exact, other.exact, out=self.exact)


def count_bytes(words: int, exact: int, bits: int) -> int:
    """Return the size of a packed vector."""
    return words * bits // 8 + exact * EXACT_BYTES


def pack_vector(vector: Vector, bits: int) -> bytes:
    """Pack a vector: its words with `bits` each, then its exact integers, all little-endian."""
    return b"".join((pack_words(vector.words, bits), vector.exact.astype("<u8", copy=False).tobytes()))


def unpack_vector(content: bytes, words: int, exact: int, bits: int) -> Vector:
    """Undo `pack_vector`. Raises BadPayload for another size."""
    if len(content) != count_bytes(words, exact, bits):
        expected = count_bytes(words, exact, bits)
        raise BadPayload("FV2312", f"a masked vector has {len(content)} bytes, expected {expected}")
    end = words * bits // 8
    return Vector(unpack_words(content[:end], bits), np.frombuffer(content[end:], "<u8").astype(np.uint64))


def pack_words(words: Words, bits: int) -> bytes | memoryview:
    """Pack words with `bits` each. With 32 bits, they are not copied."""
    if bits == 24:
        return words.astype("<u4", copy=False).view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return words.astype(f"<u{bits // 8}", copy=False).data.cast("B")


def unpack_words(content: bytes, bits: int) -> Words:
    """Return words that are packed with `bits` each."""
    if bits == 24:
        return view_words(content + b"\0", len(content) // 3, bits) & np.uint32((1 << bits) - 1)
    return view_words(content, len(content) * 8 // bits, bits).astype(np.uint32)


def view_words(content: bytes | bytearray, count: int, bits: int) -> npt.NDArray[np.unsignedinteger]:
    """View packed words without a copy. With 24 bits, one byte more is read, and bits above them are arbitrary."""
    if bits == 24:
        return np.ndarray((count,), "<u4", content, strides=(3,))
    return np.frombuffer(content, f"<u{bits // 8}", count)
