"""Tensors as they are."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedvit.roles import NONE
from fedvit.tensors import Array, Tensors
from fedvit.updates.base import Codec, Form, Shape


@dataclass(frozen=True)
class Plain(Codec):
    """float32, every bit of it."""

    name: ClassVar[str] = NONE
    source: ClassVar[str] = "-"

    def form(self, name: str, shape: Shape) -> Form:
        return {name: (shape, "float32")}

    def _code(self, name: str, value: Array) -> Tensors:
        return {name: value}

    def error_bound(self, name: str, value: Array) -> Array:
        return np.zeros((), np.float32)
