"""Packed weights in a traced step: unpacked by one operator, which a graph may join with the product that reads it."""

import torch
from torch import Tensor

from fedvit.methods.calculus import Named
from fedvit.precision import SCALE


@torch.library.custom_op("fedvit::unpack", mutates_args=())
def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, ...) int8 times the (out,) scales of its first axis, as float32."""
    return packed.to(scale.dtype) * scale.reshape(-1, *(1 for _ in packed.shape[1:]))


@unpack.register_fake
def _(packed: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(packed, dtype=scale.dtype)


def unpacked(tensors: Named) -> dict[str, Tensor]:
    """All tensors as float32 by their own names."""
    result = {}
    for name, value in tensors.items():
        if name.endswith(SCALE):
            continue
        if (scale := tensors.get(name + SCALE)) is not None:
            value = unpack(value, scale)
        result[name] = value.float() if value.dtype is torch.float16 else value
    return result
