"""Numbers in fewer bits.

Weights that a device does not train are sent in fewer bytes: float16, or int8 with a scale for every output channel. A
packed tensor keeps its name; the name of its scales ends in SCALE.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from fedvit.program import TensorSpec
from fedvit.roles import Compute as Compute
from fedvit.roles import Precision as Precision
from fedvit.tensors import Array, Tensors

SCALE = "/scale"

STEPS, STEPS_OF_FACTORS = 127, 64
"""Largest absolute values of int8: in weights that are unpacked where they are read, and in factors of integer
products. x86 processors without VNNI saturate sums of two products at 2^15: 2 x 255 x 64 is below it."""


def pack_weights(tensors: Mapping[str, Array], precision: Precision, *, steps: int = STEPS) -> Tensors:
    """The tensors as they are sent: matrices and larger in `precision`, vectors as they are.

    int8: w = q s, with s = max |w| / `steps` over an output channel, the first axis; a weight's error is at most s / 2.
    float16: the error is at most 2^-11 of a weight, and 3e-8 for the smallest. Values beyond 65504 become infinite.
    """
    result: Tensors = {}
    for name, value in tensors.items():
        if precision == "fp32" or not is_packed(name, value.shape):
            result[name] = value
        elif precision == "fp16":
            result[name] = value.astype(np.float16)
        else:
            numbers = value.astype(np.float32)
            largest = np.abs(numbers).max(axis=tuple(range(1, value.ndim)), keepdims=True)
            scale = np.where(largest > 0, largest / steps, 1).astype(np.float32)
            result[name] = np.rint(numbers / scale).astype(np.int8)
            result[name + SCALE] = scale.reshape(-1)
    return result


def as_specified(tensors: Mapping[str, Array], specs: Mapping[str, TensorSpec]) -> Tensors:
    """The tensors as a Program of a packing method has them."""
    precisions: dict[str, Precision] = {"float16": "fp16", "int8": "int8"}
    result: Tensors = {}
    for name, value in tensors.items():
        wanted = specs[name].dtype
        result |= pack_weights({name: value}, "fp32" if wanted == str(value.dtype) else precisions[wanted])
    return result


def is_packed(name: str, shape: Iterable[int]) -> bool:
    """Return whether a tensor is a weight worth packing: norms, biases, tokens and positions are not.

    >>> [is_packed(*each) for each in (("mlp.fc1.weight", (8, 4)), ("norm.weight", (4,)), ("pos_embed", (1, 5, 4)))]
    [True, False, False]
    """
    return name.endswith("weight") and len(tuple(shape)) >= 2
