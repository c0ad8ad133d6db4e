"""The numbers of a sum: words modulo 2**bits for tensors, and exact integers modulo 2**64 for weights and counts."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedvit.errors import BadPayload
from fedvit.secure.fixed_point import Words
from fedvit.secure.keys import stream_mask

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
        self.words[:] &= np.uint32((1 << bits) - 1)
        np.add(self.exact, other.exact, out=self.exact)


def count_bytes(words: int, exact: int, bits: int) -> int:
    """Return the size of a packed vector."""
    return words * bits // 8 + exact * EXACT_BYTES


def pack_vector(vector: Vector, bits: int) -> bytes:
    """Pack a vector: its words with `bits` each, then its exact integers, all little-endian."""
    return _pack_words(vector.words, bits) + vector.exact.astype("<u8").tobytes()


def unpack_vector(content: bytes, words: int, exact: int, bits: int) -> Vector:
    """Undo `pack_vector`. Raises BadPayload for another size."""
    if len(content) != count_bytes(words, exact, bits):
        expected = count_bytes(words, exact, bits)
        raise BadPayload("FV2312", f"a masked vector has {len(content)} bytes, expected {expected}")
    end = words * bits // 8
    return Vector(_unpack_words(content[:end], bits), np.frombuffer(content[end:], "<u8").astype(np.uint64))


def add_mask(vector: Vector, key: bytes, bits: int, *, subtract: bool = False) -> None:
    """Add the mask of a key to a vector in place, or subtract it."""
    operate = np.subtract if subtract else np.add
    each = bits // 8
    word_bytes = len(vector.words) * each
    first, rest = 0, b""
    for block in stream_mask(key, count_bytes(len(vector.words), len(vector.exact), bits)):
        rest = rest + block if rest else block
        count = min(len(rest) // each, len(vector.words) - first)
        if count > 0:
            part = vector.words[first : first + count]
            operate(part, _unpack_words(rest[: count * each], bits), out=part)
            part &= np.uint32((1 << bits) - 1)
            first, rest = first + count, rest[count * each :]
    assert first * each == word_bytes
    operate(vector.exact, np.frombuffer(rest, "<u8"), out=vector.exact)


def _pack_words(words: Words, bits: int) -> bytes:
    if bits == 24:
        return words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    return words.astype(f"<u{bits // 8}").tobytes()


def _unpack_words(content: bytes, bits: int) -> Words:
    if bits == 24:
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, :3] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return padded.view("<u4")[:, 0].astype(np.uint32)
    return np.frombuffer(content, f"<u{bits // 8}").astype(np.uint32)
