"""Masks of secure sums: a key's stream, added to a vector or subtracted from it."""

import numpy as np

from fedvit.secure.keys import stream_mask
from fedvit.secure.vectors import Vector, count_bytes, unpack_words


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
            operate(part, unpack_words(rest[: count * each], bits), out=part)
            if bits < 32:
                part &= np.uint32((1 << bits) - 1)
            first, rest = first + count, rest[count * each :]
    assert first * each == word_bytes
    operate(vector.exact, np.frombuffer(rest, "<u8"), out=vector.exact)
