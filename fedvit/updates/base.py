"""The base of codecs: named float32 tensors in fewer bytes, with a known largest error."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from fedvit.errors import BadPayload
from fedvit.tensors import Array, Tensors

Shape = tuple[int | None, ...]
"""None: any length, of a first axis that counts samples."""
Form = dict[str, tuple[Shape, str]]
"""(shape, dtype) by name, as `check_tensors` wants it."""

LEAST_VALUES = 256
"""Smaller tensors are not coded: the names of the parts would take the saved bytes."""


@dataclass(frozen=True)
class Codec(ABC):
    """One way to code tensors. A part beside the numbers is called after its tensor: `NAME#scale`.

    The same numbers always give the same bytes, on any machine. Which tensors are coded follows from their shapes.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    keeps_shape: ClassVar[bool] = True
    """True if coded numbers have their tensor's shape, so that a decoder needs no other information."""

    @abstractmethod
    def form(self, name: str, shape: Shape) -> Form:
        """Return the coded form of a tensor of this shape, so that its size is known before it is coded."""

    @abstractmethod
    def _code(self, name: str, value: Array) -> Tensors:
        """The parts of one tensor; only called where `form` says that it is coded."""

    @abstractmethod
    def error_bound(self, name: str, value: Array) -> Array:
        """The largest |decoded - value|; a shape that broadcasts to the value's."""

    def encode(self, tensors: Mapping[str, Array], *, samples: bool = False) -> Tensors:
        """float32 tensors in their coded form; with `samples`, whose first axis may have any length.

        Raises BadPayload, naming the tensor, for NaN, an infinity, and what is beyond the codec's range.
        """
        coded: Tensors = {}
        for name, value in tensors.items():
            if value.dtype != np.float32:
                raise BadPayload("FV2309", f"{name!r} is {value.dtype}; codecs support float32 only")
            if not np.isfinite(value).all():
                raise BadPayload("FV2309", f"{name!r} holds NaN or infinite values, which {self.name} does not code")
            shape = (None, *value.shape[1:]) if samples else value.shape
            plain = self.form(name, shape) == {name: (shape, "float32")}
            parts = {name: value} if plain else self._code(name, value)
            if not np.isfinite(parts[name]).all():
                largest = float(np.abs(value).max())
                raise BadPayload("FV2309", f"{name!r} holds values up to {largest:g}, beyond the range of {self.name}")
            coded |= parts
        return coded

    @property
    def text(self) -> str:
        """Form in configurations and Programs: `top_k:share=0.05`."""
        options = ",".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{self.name}:{options}" if options else self.name


def numbers(shape: Shape) -> int | None:
    """Count a tensor's numbers; None if a length is unknown.

    >>> numbers((2, 3)), numbers((None, 3))
    (6, None)
    """
    return None if None in shape else math.prod(length for length in shape if length is not None)


def is_small(shape: Shape) -> bool:
    count = numbers(shape)
    return count is not None and count < LEAST_VALUES
