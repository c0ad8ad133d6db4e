"""A partition: devices differ in how much they have, not in what."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class PowerLaw(Partition):
    """Device k of 1, 2, ... gets a share of all samples that is proportional to k ** -exponent."""

    exponent: float = 1.0  # 0: equal shares

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 10:
            raise ConfigError("FV2002", f"partition: exponent is {self.exponent}, expected a number of 0 to 10")

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        shares = np.arange(1, devices + 1) ** -self.exponent
        cuts = np.rint(np.cumsum(shares / shares.sum()) * len(samples)).astype(np.int64)[:-1]
        return [np.sort(part).astype(np.int64) for part in np.split(rng.permutation(len(samples)), cuts)]
