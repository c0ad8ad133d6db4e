"""The table [images]."""

from typing import Annotated

from msgspec import Meta, Struct


class ImageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Image augmentation on devices: the table [images]."""

    crop_padding: Annotated[
        int, Meta(ge=0, le=64, description="Random crop after reflecting this many pixels at each border.")
    ] = 0
    flip: Annotated[bool, Meta(description="Random left-right flip.")] = False
    brightness: Annotated[float, Meta(ge=0, lt=1, description="Random brightness factor in [1 - this, 1 + this].")] = (
        0.0
    )
