"""Names that Programs and configurations share; a separate module, as importing numpy takes long."""

import enum
from typing import Literal

ProductPrecision = Literal["fp32", "tf32", "bf16"]
"""Precision of a server's products: tf32 rounds factors to 10 bits, bf16 computes in bfloat16. Weights are float32."""
Precision = Literal["fp32", "fp16", "int8"]
"""Numbers in which weights that a device does not train are sent."""
Compute = Literal["fp32", "fp16", "int8"]
"""Number format of a training step's products with weights: float32, float16 or integers of 8 bits."""
Novel = Literal["own", "generator"]
"""Learning parts for novel devices: their own tensors and embeddings on the server, or also its generator."""
NONE = "none"
"""The codec that changes nothing."""


class Role(enum.StrEnum):
    """The source of a group's value at the start of a round, whether the device trains it, and what is sent back."""

    FROZEN = "frozen"  # sent once, cached by digest; not trained
    GLOBAL = "global"  # the server, each round; frozen on the device
    SEEDED = "seeded"  # the server, each round; trained on the device, not sent back
    SHARED = "shared"  # the server, each round; trained, delta sent back to be averaged
    GENERATED = "generated"  # the server, made for this device; trained, delta sent back
    ASSIGNED = "assigned"  # the server, made for this device; only its training reads it
    LOCAL = "local"  # the device's vault; trained, never leaves the device

    @property
    def from_server_each_round(self) -> bool:
        return self in (Role.GLOBAL, Role.SEEDED, Role.SHARED) or self.is_made_for_device

    @property
    def is_made_for_device(self) -> bool:
        return self in (Role.GENERATED, Role.ASSIGNED)

    @property
    def is_trained_on_device(self) -> bool:
        return self in (Role.SEEDED, Role.SHARED, Role.GENERATED, Role.LOCAL)

    @property
    def is_sent_back(self) -> bool:
        return self in (Role.SHARED, Role.GENERATED)
