"""Half the bytes: every number rounded to float16."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedvit.tensors import Array, Tensors
from fedvit.updates.base import Codec, Form, Shape, is_small


@dataclass(frozen=True)
class Fp16(Codec):
    """IEEE 754 binary16, to the nearest, ties to even.

    The error is at most 2^-11 of a number, and 2^-25 of one below 2^-14. Numbers of 65520 and more are refused.
    """

    name: ClassVar[str] = "fp16"
    source: ClassVar[str] = "IEEE 754-2019, binary16"

    def form(self, name: str, shape: Shape) -> Form:
        return {name: (shape, "float32" if is_small(shape) else "float16")}

    def _code(self, name: str, value: Array) -> Tensors:
        with np.errstate(over="ignore"):  # what is beyond the range is refused by `encode`
            return {name: value.astype(np.float16)}

    def error_bound(self, name: str, value: Array) -> Array:
        return np.maximum(np.abs(value) * np.float32(2**-11), np.float32(2**-25))
