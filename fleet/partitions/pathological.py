"""A fixed number of classes per device, the hardest label skew of the papers."""

import math
from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition, gather, refuse_empty


@dataclass(frozen=True, kw_only=True)
class Pathological(Partition):
    """Every device gets at most `classes_per_device` classes, a share of each (FedTP, pFedHN).

    A class is cut into q = classes_per_device * devices / classes shares, in the proportions of q draws
    from U(.4, .6). Devices take shares one by one, at random among the classes with the most shares left;
    a device may get two shares of one class. Shares are rounded down: of each class fewer than q samples
    are left out.

    Differs from pFedHN: q is the whole number above, not floor + 1, so that no share is left over.
    """

    leaves_out = True

    classes_per_device: int = 2  # papers: c, 2 for CIFAR-10, 10 for CIFAR-100

    def __post_init__(self) -> None:
        if self.classes_per_device < 1:
            raise ConfigError("FV2003", f"partition: classes_per_device is {self.classes_per_device}, expected >= 1")

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when q is not a whole number, or a device would get nothing."""
        classes = np.unique(samples.labels)
        shares = self._shares_per_class(len(classes), devices)
        left = [_cut(rng.permutation(np.flatnonzero(samples.labels == label)), shares, rng) for label in classes]
        parts = []
        for _ in range(devices):
            pieces = []
            for _ in range(self.classes_per_device):
                counts = np.array([len(pieces_left) for pieces_left in left])
                pieces.append(left[rng.choice(np.flatnonzero(counts == counts.max()))].pop())
            parts.append(gather(pieces))
        return refuse_empty("pathological", parts)

    def _shares_per_class(self, classes: int, devices: int) -> int:
        if self.classes_per_device > classes:
            raise ConfigError(
                "FV2003",
                f"partition: classes_per_device is {self.classes_per_device}, the data set has {classes} classes",
            )
        shares, left_over = divmod(self.classes_per_device * devices, classes)
        if left_over:
            step = classes // math.gcd(classes, self.classes_per_device)
            fewer, more = devices // step * step, (devices // step + 1) * step
            raise ConfigError(
                "FV2003",
                f"partition: {devices} devices with classes_per_device {self.classes_per_device} take"
                f" {self.classes_per_device * devices} shares, which is no multiple of the {classes} classes;"
                f" with {self.classes_per_device} classes each, use {f'{fewer} or ' if fewer else ''}{more} devices",
            )
        return shares


def _cut(members: Indices, shares: int, rng: np.random.Generator) -> list[Indices]:
    weights = rng.uniform(0.4, 0.6, size=shares)
    sizes = (weights / weights.sum() * len(members)).astype(np.int64)
    return np.split(members, np.cumsum(sizes))[:-1]
