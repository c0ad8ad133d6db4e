"""Numbers as integers modulo 2**bits, so that masks hide them completely and sums are exact.

A device clips each number to `terms.range`, multiplies it by its weight, and rounds it at random to a whole number of
steps, so that the rounding has mean zero. The steps are so large that the sum of all devices cannot wrap.
"""

import numpy as np
import numpy.typing as npt

from fedvit.errors import ConfigError
from fedvit.tensors import Array
from fedvit.wire.messages import SumTerms

Words = npt.NDArray[np.uint32]
"""Integers modulo 2**bits."""
BLOCK_VALUES = 1 << 15
"""Numbers that are converted at a time: they stay in the processor's cache."""


def count_levels(bits: int, devices: int) -> int:
    """Return the largest integer of one device, so that sums of all devices cannot wrap. Raises ConfigError for none.

    >>> count_levels(16, 4), count_levels(32, 100)
    (8191, 21474836)
    """
    levels = ((1 << (bits - 1)) - 1) // devices
    if levels < 1:
        raise ConfigError("FV1024", f"bits = {bits}: sums of {devices} devices do not fit")
    return levels


def choose_bits(levels: int, devices: int) -> int:
    """Choose the fewest bits of a number with which each device has so many integers on each side of zero.

    >>> choose_bits(127, 258), choose_bits(127, 259), choose_bits(2047, 16)
    (16, 24, 16)
    """
    return next((bits for bits in (16, 24) if ((1 << (bits - 1)) - 1) // devices >= levels), 32)


def find_step(terms: SumTerms) -> float:
    """Return the step of a device's numbers: of the mean, if all devices have the largest weight, times devices."""
    return terms.range / count_levels(terms.bits, terms.devices)


def encode_values(values: Array, weight: int, terms: SumTerms, draw: np.random.Generator) -> tuple[Words, int]:
    """Encode (n,) finite numbers of a device; return (n,) words, and how many numbers were clipped.

    `weight`: of the device, counted up to `terms.max_weight`. `draw` rounds up or down.
    """
    words, clipped = np.empty(len(values), np.uint32), 0
    factor = min(weight, terms.max_weight) / terms.max_weight / find_step(terms)
    for first in range(0, len(values), BLOCK_VALUES):
        block = values[first : first + BLOCK_VALUES].astype(np.float64)
        clipped += int(np.count_nonzero(np.abs(block) > terms.range))
        np.clip(block, -terms.range, terms.range, out=block)
        block *= factor
        block += draw.random(len(block))
        steps = np.floor(block).astype(np.int64)
        words[first : first + len(block)] = steps & ((1 << terms.bits) - 1)
    return words, clipped


def decode_mean(total: Words, weight: int, terms: SumTerms) -> npt.NDArray[np.float64]:
    """Decode the sum of all devices' words, (n,), as the mean by weight. `weight`: of all devices together, > 0."""
    steps = total.astype(np.int64)
    steps[steps >= 1 << (terms.bits - 1)] -= 1 << terms.bits
    mean: npt.NDArray[np.float64] = np.multiply(steps, find_step(terms) * terms.max_weight / weight, dtype=np.float64)
    return mean


def find_error_bound(weight: int, terms: SumTerms) -> float:
    """Return the largest possible error of `decode_mean`, of numbers that were not clipped: a step of every device."""
    return terms.devices * find_step(terms) * terms.max_weight / weight
