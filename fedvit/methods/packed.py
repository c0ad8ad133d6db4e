"""Packed weights: as they are sent, and in a traced step.

A step unpacks them by one operator, which a graph may join with the product that reads it.
"""

import torch
from torch import Tensor

from fedvit import precision
from fedvit.methods.base import Method, list_untrained
from fedvit.methods.calculus import Named
from fedvit.models.vit import PatchViT
from fedvit.tensors import Tensors


def as_sent(method: Method, vit: PatchViT, values: Tensors) -> Tensors:
    """`values`, tensors of the Program, as devices get them: those that nothing moves in `sent_precision`."""
    still = set(list_untrained(method, vit))
    steps = precision.STEPS_OF_FACTORS if method.compute == "int8" else precision.STEPS
    sent: Tensors = {}
    for name, value in values.items():  # in their order: devices of different roles may share graphs
        sent |= precision.pack_weights({name: value}, method.sent_precision if name in still else "fp32", steps=steps)
    return sent


@torch.library.custom_op("fedvit::unpack", mutates_args=())
def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """(out, ...) int8 times the (out,) scales of its first axis, as float32."""
    return packed.to(scale.dtype) * scale.reshape(-1, *(1 for _ in packed.shape[1:]))


@unpack.register_fake
def _(packed: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(packed, dtype=scale.dtype)


def unpack_tensors(tensors: Named) -> dict[str, Tensor]:
    """All tensors as float32 by their own names."""
    result = {}
    for name, value in tensors.items():
        if name.endswith(precision.SCALE):
            continue
        if (scale := tensors.get(name + precision.SCALE)) is not None:
            value = unpack(value, scale)
        result[name] = value.float() if value.dtype is torch.float16 else value
    return result
