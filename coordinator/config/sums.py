"""The table [sums]: secure sums (docs/security.md)."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

LEAST_DEVICES = 3
"""Devices of the smallest sum: of two, each would learn the other's part."""

SUM_CODECS = {"fp16": 2047, "int8": 127}
"""Integers on each side of zero that a device has in a sum, at least, by codec of updates."""


class SumsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Secure sums: the table [sums]. It has an effect with `secure` only."""

    range: Annotated[
        float, Meta(ge=1e-6, le=1e6, description="Numbers of an update are clipped to [-range, range].")
    ] = 4.0
    bits: Annotated[
        Literal[16, 24, 32],
        Meta(
            description="Bits of a number: fewer are sent faster, and rounded more coarsely. With `updates.up`, those "
            "of the first round."
        ),
    ] = 32
    neighbours: Annotated[
        int, Meta(ge=2, le=128, description="Other devices with which a device has masks in common, at least.")
    ] = 20
    leaving: Annotated[
        float,
        Meta(
            ge=0,
            le=0.1,
            description="Share of the devices that is expected to leave in each step: a device then has as many more "
            "neighbours as a sum needs.",
        ),
    ] = 0.0
    step_s: Annotated[float, Meta(gt=0, le=86400, description="Seconds to wait for devices in each step of a sum.")] = (
        120.0
    )
