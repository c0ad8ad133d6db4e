"""What may be done to any update before it travels, so that it takes fewer bytes. numpy alone: devices do it, too.

A codec codes named float32 tensors; coded tensors say themselves how to undo it, but for the shapes of sparse ones.
Codecs are written as text, in configurations and in Programs: `int8`, `top_k:share=0.01`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from fedvit.errors import BadPayload, ConfigError
from fedvit.tensors import Array, Tensors
from fedvit.updates.base import Codec, Form, Shape
from fedvit.updates.fp16 import Fp16
from fedvit.updates.int8 import SCALE, Int8, from_int8
from fedvit.updates.none import Plain
from fedvit.updates.top_k import COUNT, INDEX, TopK, from_top_k

__all__ = ["CODECS", "NONE", "Codec", "Form", "Shape", "coded_form", "decode", "decode_one", "make_codec"]

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Plain, Fp16, Int8, TopK)}
NONE = Plain.name


def make_codec(text: str) -> Codec:
    """The codec that a text names. Raises ConfigError that says which there are.

    >>> make_codec("top_k:share=0.01")
    TopK(share=0.01)
    """
    name, _, options = text.partition(":")
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; known are {', '.join(CODECS)}")
    given: dict[str, Any] = {}
    for pair in filter(None, options.split(",")):
        key, equals, value = pair.partition("=")
        known = [field.name for field in fields(CODECS[name])]
        if not equals or key not in known:
            raise ConfigError(f"codec {text!r}: {pair!r} is none of its options ({', '.join(known) or 'it has none'})")
        try:
            given[key] = float(value)
        except ValueError:
            raise ConfigError(f"codec {text!r}: {key} = {value!r} is no number") from None
    return CODECS[name](**given)


def decode(coded: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The float32 tensors of a coded form, and whatever else is there as it is.

    `shapes` has those of all sparse tensors. Raises BadPayload where parts do not belong together.
    """
    return {name: decode_one(name, coded, shapes.get(name)) for name in coded if "#" not in name}


class Decoded(Mapping[str, Array]):
    """As `decode`, each tensor only when it is looked at: a mapped upload is never in memory as a whole."""

    def __init__(self, coded: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._coded = coded
        self._shapes = shapes
        self._names = [name for name in coded if "#" not in name]

    def __getitem__(self, name: str) -> Array:
        return decode_one(name, self._coded, self._shapes.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def decode_one(name: str, coded: Mapping[str, Array], shape: tuple[int, ...] | None) -> Array:
    """As `decode`, for one tensor."""
    value = coded[name]
    if name + INDEX in coded:
        if shape is None:
            raise BadPayload(f"{name!r} is sparse, and no tensor of that name is known")
        parts = (name, name + INDEX, name + COUNT)
        return from_top_k(name, {part: coded[part] for part in parts if part in coded}, shape)
    if name + SCALE in coded:
        return from_int8(value, coded[name + SCALE])
    return value.astype(np.float32) if value.dtype == np.float16 else value


def coded_form(codec: Codec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The form of several tensors whose shapes are known, as `packed_size` wants it."""
    form: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, shape in shapes.items():
        for part, (lengths, dtype) in codec.form(name, shape).items():
            form[part] = (tuple(length or 0 for length in lengths), dtype)
    return form
