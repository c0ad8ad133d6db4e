"""A quarter of the bytes: whole numbers from -127 to 127, with one scale for each row of a matrix."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedvit.tensors import Array, Tensors
from fedvit.updates.base import Codec, Form, Shape, is_small

SCALE = "#scale"
LEAST_ROW = 16
"""Numbers that share a scale; in shorter rows the scales would take too much of what is saved."""
_TINY = np.float32(1e-36)
"""A row whose largest number is smaller is zero: its scale would lose digits itself."""


@dataclass(frozen=True)
class Int8(Codec):
    """x = q s with s = max |x| / 127 over a row, which is an entry of the first axis: an output channel, a sample.

    The error is at most s / 2 (1 + 1e-4), where s is the row's scale, and 1e-36. Vectors are not coded.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "Jacob et al., arXiv:1712.05877, with the zero point at 0 and a scale for each channel"

    def form(self, name: str, shape: Shape) -> Form:
        row = math.prod(length or 0 for length in shape[1:])
        if len(shape) < 2 or row < LEAST_ROW or is_small(shape):
            return {name: (shape, "float32")}
        return {name: (shape, "int8"), name + SCALE: (shape[:1], "float32")}

    def _code(self, name: str, value: Array) -> Tensors:
        rows = _rows(value)
        scale = _scales(rows)
        return {
            name: np.clip(np.rint(np.divide(rows, scale[:, None])), -127, 127).astype(np.int8).reshape(value.shape),
            name + SCALE: scale,
        }

    def error_bound(self, name: str, value: Array) -> Array:
        if name + SCALE not in self.form(name, value.shape):
            return np.zeros((), np.float32)
        rows = _rows(value)
        largest = np.abs(rows).max(axis=1, initial=0)
        bound: Any = np.where(largest > _TINY, np.multiply(_scales(rows), np.float32(0.50005)), largest)
        result: Array = bound.reshape(-1, *(1 for _ in value.shape[1:]))
        return result


def _rows(value: Array) -> Array:
    return value.reshape(len(value), math.prod(value.shape[1:]))


def _scales(rows: Array) -> Array:
    largest = np.abs(rows).max(axis=1, initial=0)
    # 127 times the rounded scale of the largest float would be infinite
    return np.where(largest > _TINY, np.minimum(largest, np.float32(3.4e38)) / np.float32(127), 1).astype(np.float32)


def from_int8(coded: Array, scale: Array) -> Array:
    """Undo it: (rows, ...) int8 times the (rows,) scales, as float32."""
    with np.errstate(over="ignore"):  # of scales that nobody sends; what is infinite is refused where it comes in
        value: Array = np.multiply(coded.astype(np.float32), scale.reshape(-1, *(1 for _ in coded.shape[1:])))
    return value
