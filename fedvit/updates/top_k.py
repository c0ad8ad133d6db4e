"""The largest entries only: their positions, and their values as float16."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedvit.errors import BadPayload, ConfigError
from fedvit.tensors import Array, TensorReader, Tensors
from fedvit.updates.base import Codec, Form, Shape, is_small, numbers

INDEX, COUNT = "#index", "#count"
BLOCK = 1 << 16
"""Positions are counted within blocks of so many entries, so that two bytes hold each."""


@dataclass(frozen=True)
class TopK(Codec):
    """Send the `share` of each tensor's entries with the largest absolute values; among equal ones the first.

    An entry that is sent has float16's error, one that is not its own size: at most the smallest that is sent.
    The rest is not lost if the sender adds it to its next update (error feedback).
    """

    name: ClassVar[str] = "top_k"
    source: ClassVar[str] = "Stich et al., arXiv:1809.07599; Lin et al., arXiv:1712.01887"
    keeps_shape: ClassVar[bool] = False

    share: float = 0.05

    def __post_init__(self) -> None:
        if not (isinstance(self.share, float) and 0 < self.share <= 0.5):
            raise ConfigError("FV1011", f"top_k: share = {self.share!r} must be above 0 and at most 0.5")

    def form(self, name: str, shape: Shape) -> Form:
        count = numbers(shape)
        if count is None or is_small(shape):
            return {name: (shape, "float32")}
        kept = _count_kept(count, self.share)
        form: Form = {name: ((kept,), "float16"), name + INDEX: ((kept,), "uint16")}
        if count > BLOCK:
            form[name + COUNT] = ((_blocks(count),), "int32")
        return form

    def _code(self, name: str, value: Array) -> Tensors:
        flat = value.reshape(-1)
        places = _largest(np.abs(flat), _count_kept(flat.size, self.share))
        with np.errstate(over="ignore"):  # what is beyond the range is refused by `encode`
            parts: Tensors = {name: flat[places].astype(np.float16), name + INDEX: (places % BLOCK).astype(np.uint16)}
        if flat.size > BLOCK:
            parts[name + COUNT] = np.bincount(places // BLOCK, minlength=_blocks(flat.size)).astype(np.int32)
        return parts

    def error_bound(self, name: str, value: Array) -> Array:
        if name + INDEX not in self.form(name, value.shape):
            return np.zeros((), np.float32)
        size = np.abs(value)
        flat = size.reshape(-1)
        smallest = flat[_largest(flat, _count_kept(flat.size, self.share))].min()
        coded = np.maximum(size * np.float32(2**-11), np.float32(2**-25))
        bound: Array = np.where(size > smallest, coded, np.maximum(size, coded))
        return bound


def _count_kept(count: int, share: float) -> int:
    return max(1, math.ceil(share * count - 1e-9))


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _largest(sizes: Array, kept: int) -> Array:
    """Ascending places of the `kept` largest; the same whatever way of sorting is used."""
    threshold = np.partition(sizes, sizes.size - kept)[sizes.size - kept]
    above = np.flatnonzero(sizes > threshold)
    equal = np.flatnonzero(sizes == threshold)[: kept - above.size]
    return np.sort(np.concatenate([above, equal]))


def places_of(name: str, coded: Tensors, count: int) -> Array:
    """Flat positions of the entries. Raises BadPayload if they are not ascending positions of the tensor."""
    index = coded[name + INDEX].astype(np.int64)
    if name + COUNT in coded:
        counts = coded[name + COUNT].astype(np.int64)
        if counts.min() < 0 or counts.sum() != index.size or counts.size != _blocks(count):
            raise BadPayload("FV2309", f"{name!r}: its blocks hold {counts.sum()} entries, {index.size} were sent")
        index = index + np.repeat(np.arange(counts.size) * BLOCK, counts)
    if index.size and (index[-1] >= count or (np.diff(index) <= 0).any()):
        raise BadPayload("FV2309", f"{name!r}: its positions are not ascending, or beyond its {count} entries")
    return index


def from_top_k(name: str, coded: Tensors, shape: tuple[int, ...]) -> Array:
    """Undo it: zeros, but for the entries that were sent."""
    value = np.zeros(math.prod(shape), np.float32)
    value[places_of(name, coded, value.size)] = coded[name].astype(np.float32)
    return value.reshape(shape)


def part_of_top_k(name: str, coded: TensorReader, first: int, last: int) -> Array:
    """Decode, like `from_top_k`, some flat places of a tensor whose parts belong together."""
    begin, end = 0, math.prod(coded.shape(name))
    blocks = range(first // BLOCK, _blocks(last))
    counts: Any = np.array([end])
    if name + COUNT in coded:
        counts = coded[name + COUNT].astype(np.int64)
        begin = int(counts[: blocks.start].sum())
        counts = counts[blocks.start : blocks.stop]
        end = begin + int(counts.sum())
    index = coded.part(name + INDEX, begin, end).astype(np.int64)
    places = index + np.repeat(np.arange(blocks.start, blocks.start + len(counts)) * BLOCK, counts) - first
    inside = (places >= 0) & (places < last - first)
    value = np.zeros(last - first, np.float32)
    value[places[inside]] = coded.part(name, begin, end)[inside].astype(np.float32)
    return value
