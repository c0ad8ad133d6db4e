"""Noise of differential privacy in a sum: each device adds a share to its numbers before they become integers.

So nobody ever sees less noise than that of the whole sum. The share is sized for the fewest devices whose sum can be
revealed: more devices give more noise, and devices that drop out need no compensation.

Rounding to integers keeps the guarantee. A device rounds x + n at random, with n from N(0, s^2), in units of a step.
The result is k with probability g(k - x), where g is the density of n plus the error of the rounding: it is sampled
from a density that does not depend on x otherwise. The convolution of such samples is the sample of the convolved
densities, up to aliasing of e^(-pi^2 s^2), by Poisson's summation. So the sum of all integers is distributed as the
random rounding of the exact sum, with Gaussian noise of all shares together and independent rounding errors added:
it follows from the output of the Gaussian mechanism without another look at the data. With a share of four steps,
the aliasing is below 1e-68 for each number. As in the distributed discrete Gaussian (Kairouz et al., arXiv:2102.06387)
and Skellam mechanisms (Agarwal et al., arXiv:2110.04995), numbers are not clipped after the noise: the sum wraps.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fedvit.secure.fixed_point import Words, find_step
from fedvit.secure.neighbours import count_least_devices
from fedvit.tensors import Array
from fedvit.wire.messages import SumNoise, SumTerms

if TYPE_CHECKING:  # imports cryptography, which other runs do not need
    from fedvit.secure.keys import MaskStream

LEAST_STEPS = 4.0
"""Standard deviation of a device's noise, in steps, from which on the rounding costs no privacy."""
TAIL = 8.0
"""Standard deviations of the noise that fit into the range: more in one number have a probability of 1e-15."""
BLOCK_VALUES = 1 << 18
"""Numbers that are drawn at a time. Another number would give another noise for the same key."""
COUNT_STEPS = 1 << 20
"""Steps of a noisy count of devices."""


class NoiseShare(NamedTuple):
    """The noise that one device adds. The same stream gives the same noise, so that one mask covers one payload."""

    ratio: float  # standard deviation, as a share of that in the sum of the fewest devices
    stream: "MaskStream"  # of a secret key


def find_ratio(devices: int, neighbours: int) -> float:
    """Return a device's share of the noise, if the sum begins with so many devices.

    >>> find_ratio(4, 20)
    0.5773502691896258
    """
    return 1 / math.sqrt(count_least_devices(devices, neighbours))


def find_range(noise: SumNoise, devices: int, neighbours: int) -> float:
    """Return the range of a device's numbers with its noise, in which the sum does not wrap."""
    return noise.clip * (1 + TAIL * noise.multiplier * find_ratio(devices, neighbours))


def count_noise_steps(terms: SumTerms, devices: int) -> float:
    """Return the standard deviation of a device's noise in steps of its integers, if the sum begins with so many."""
    assert terms.noise is not None  # asked by callers
    return terms.noise.multiplier * terms.noise.clip * find_ratio(devices, terms.neighbours) / find_step(terms)


def find_multiplier(terms: SumTerms, began: int, summed: int) -> float:
    """Return the noise multiplier of a sum of `summed` devices that `began` with more: of update and count together.

    The count moves by a half if a device is added, so that it is a second Gaussian mechanism.
    """
    assert terms.noise is not None  # asked by callers
    precision = terms.noise.multiplier**-2
    if terms.noise.counting:
        precision += (2 * terms.noise.counting) ** -2
    return math.sqrt(summed / precision) * find_ratio(began, terms.neighbours)


def draw_normal(stream: "MaskStream", count: int) -> npt.NDArray[np.float64]:
    """Draw (count,) standard normal numbers from a key's stream (Box and Muller, 64 bits for each factor)."""
    half = -(-count // 2)
    drawn = np.frombuffer(stream.read(16 * half), "<u8").reshape(2, half)
    radius = np.sqrt(-2 * np.log((drawn[0].astype(np.float64) + 1) * 2.0**-64))
    angle = drawn[1].astype(np.float64) * (2 * np.pi * 2.0**-64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def round_randomly(steps: npt.NDArray[np.float64], stream: "MaskStream") -> npt.NDArray[np.int64]:
    """Round (n,) numbers up or down, so that the error has mean zero."""
    drawn = np.frombuffer(stream.read(4 * len(steps)), "<u4")
    return np.floor(steps + drawn * 2.0**-32).astype(np.int64)


def encode_noisily(values: Array, spread: float, factor: float, terms: SumTerms, stream: "MaskStream") -> Words:
    """Encode (n,) numbers of a device, times `factor`, with noise of standard deviation `spread`; return (n,) words."""
    words, step = np.empty(len(values), np.uint32), find_step(terms)
    for first in range(0, len(values), BLOCK_VALUES):
        block = values[first : first + BLOCK_VALUES].astype(np.float64)
        block *= factor / step
        block += draw_normal(stream, len(block)) * (spread / step)
        words[first : first + len(block)] = round_randomly(block, stream) & ((1 << terms.bits) - 1)
    return words


def count_noisily(is_counted: bool, spread: float, stream: "MaskStream") -> int:
    """Return 1/2 for a device that is counted, else -1/2, with noise, in steps of `COUNT_STEPS`."""
    value = (0.5 if is_counted else -0.5) + draw_normal(stream, 1) * spread
    return int(round_randomly(value * COUNT_STEPS, stream)[0])
