"""Codecs, which reduce the bytes of updates. They need numpy only, as devices use them.

A codec codes named float32 tensors; coded tensors describe their decoding, except for the shapes of sparse ones.
Codecs are written as text, in configurations and in Programs: `int8`, `top_k:share=0.01`.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from fedvit.errors import BadPayload, ConfigError
from fedvit.roles import NONE
from fedvit.tensors import Array, TensorReader, Tensors, reader_of
from fedvit.updates.base import Codec, Form, Shape
from fedvit.updates.fp16 import Fp16
from fedvit.updates.int8 import SCALE, Int8, from_int8
from fedvit.updates.none import Plain
from fedvit.updates.top_k import COUNT, INDEX, TopK, from_top_k, part_of_top_k

__all__ = ["CODECS", "NONE", "Codec", "Form", "Shape", "decode", "decode_one", "list_coded_forms", "make_codec"]

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Plain, Fp16, Int8, TopK)}


def make_codec(text: str) -> Codec:
    """The codec of a text. Raises ConfigError with the known ones.

    >>> make_codec("top_k:share=0.01")
    TopK(share=0.01)
    """
    name, _, options = text.partition(":")
    if name not in CODECS:
        raise ConfigError("FV1011", f"unknown codec {name!r}; known are {', '.join(CODECS)}")
    given: dict[str, Any] = {}
    for pair in filter(None, options.split(",")):
        key, equals, value = pair.partition("=")
        known = [field.name for field in fields(CODECS[name])]
        if not equals or key not in known:
            raise ConfigError(
                "FV1011", f"codec {text!r}: {pair!r} is not one of its options ({', '.join(known) or 'it has none'})"
            )
        try:
            given[key] = float(value)
        except ValueError:
            raise ConfigError("FV1011", f"codec {text!r}: {key} = {value!r} is not a number") from None
    return CODECS[name](**given)


def decode(coded: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The float32 tensors of a coded form, and other tensors unchanged.

    `shapes` has those of all sparse tensors. Raises BadPayload where parts do not belong together.
    """
    return {name: decode_one(name, coded, shapes.get(name)) for name in coded if "#" not in name}


class Decoded(TensorReader):
    """The result of `decode` with each tensor, or part of one, decoded at access.

    Of a part as little is read as its codec allows: of `none`, `fp16` and `int8` its own numbers (and scales), of
    `top_k` what was sent of the blocks of 65,536 entries that it lies in.
    """

    def __init__(self, coded: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._coded = reader_of(coded)
        self._shapes = shapes
        self._names = [name for name in coded if "#" not in name]

    @property
    def names(self) -> Collection[str]:
        return self._names

    @property
    def stored_bytes(self) -> int:
        return self._coded.stored_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises BadPayload for a sparse tensor whose shape is not known."""
        if name + INDEX not in self._coded:
            return self._coded.shape(name)
        return _require_shape(name, self._shapes.get(name))

    def part(self, name: str, first: int, last: int) -> Array:
        if name + INDEX in self._coded:
            return part_of_top_k(name, self._coded, first, last)
        value = self._coded.part(name, first, last)
        if name + SCALE in self._coded:
            row = math.prod(self._coded.shape(name)[1:])
            scales = self._coded.part(name + SCALE, first // row, -(-last // row))
            return from_int8(value, scales[np.arange(first, last) // row - first // row])
        return _as_float32(value)

    def __getitem__(self, name: str) -> Array:
        return decode_one(name, self._coded, self._shapes.get(name))


def decode_one(name: str, coded: Mapping[str, Array], shape: tuple[int, ...] | None) -> Array:
    """Decode one tensor, like `decode`."""
    if name + INDEX in coded:
        shape = _require_shape(name, shape)
        parts = (name, name + INDEX, name + COUNT)
        return from_top_k(name, {part: coded[part] for part in parts if part in coded}, shape)
    if name + SCALE in coded:
        return from_int8(coded[name], coded[name + SCALE])
    return _as_float32(coded[name])


def _require_shape(name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is None:
        raise BadPayload("FV2309", f"{name!r} is sparse, and no tensor of that name is known")
    return shape


def _as_float32(value: Array) -> Array:
    return value.astype(np.float32) if value.dtype == np.float16 else value


def list_coded_forms(codec: Codec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The form of several tensors whose shapes are known, as `compute_packed_bytes` wants it."""
    form: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in shapes.items():
        for part, (lengths, dtype) in codec.form(name, shape).items():
            form[part] = (tuple(length or 0 for length in lengths), dtype)
    return form
