"""Devices that differ in the noise of their images, not in their classes."""

import math
from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Pixels
from fedvit.errors import ConfigError
from fleet.partitions.iid import Iid

_STREAM = 1  # separates the noise of sample i from other draws of the seed


@dataclass(frozen=True, kw_only=True)
class FeatureNoise(Iid):
    """An even partition; device i of N adds N(0, s_i^2) to its images, train and test, s_i = max_std * i / (N - 1).

    Source: FedTP, feature skew (N = 10, s_M in 0, 5, 10, 15, 20). Differs from its code: noise is added to
    pixels of 0..255 and clamped there, not to normalised values, and is the same in every epoch.
    """

    max_std: float = 20.0  # of the last device, in gray levels of 0..255 (s_M)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_std) and self.max_std >= 0):
            raise ConfigError("FV2003", f"partition: max_std is {self.max_std}, expected gray levels >= 0")

    def noise_std(self, device: int, devices: int) -> float:
        return self.max_std * device / (devices - 1) if devices > 1 else 0.0


def add_noise(image: Pixels, std: float, *, seed: int, sample: int) -> Pixels:
    """The image with noise of `std` gray levels, rounded and clamped to 0..255.

    The noise of a sample depends only on the seed and the sample's index, not on its device.
    """
    if not std:
        return image
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(sample, _STREAM)))
    return np.rint(image + rng.normal(0.0, std, size=image.shape)).clip(0, 255).astype(np.uint8)
