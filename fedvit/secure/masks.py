"""Masks of secure sums: a key's stream, added to a vector or subtracted from it."""

from collections.abc import Iterable

import numpy as np

from fedvit.secure.keys import MaskStream
from fedvit.secure.vectors import EXACT_BYTES, Vector, view_words

BLOCK_WORDS = 1 << 15
"""Words that get all masks before the next ones do: with the stream's bytes they stay in the processor's cache."""


def add_masks(vector: Vector, masks: Iterable[tuple[bytes, bool]], bits: int) -> None:
    """Add the masks of keys to a vector in place. A key with True: its mask is subtracted."""
    streams = [(MaskStream(key), np.subtract if subtract else np.add) for key, subtract in masks]
    block = bytearray(BLOCK_WORDS * 4)
    for first in range(0, len(vector.words), BLOCK_WORDS):
        part = vector.words[first : first + BLOCK_WORDS]
        mask, target = view_words(block, len(part), bits), memoryview(block)[: len(part) * bits // 8]
        for stream, operate in streams:
            stream.read_into(target)
            operate(part, mask, out=part)
        if bits < 32:
            part &= np.uint32((1 << bits) - 1)
    rest = bytearray(len(vector.exact) * EXACT_BYTES)
    for stream, operate in streams:
        stream.read_into(memoryview(rest))
        operate(vector.exact, np.frombuffer(rest, "<u8"), out=vector.exact)
