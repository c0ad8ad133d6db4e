"""An even partition: all devices have the same distribution."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class Iid(Partition):
    """Every device gets an equal, random share of everything; sizes differ by at most one."""

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        parts = np.array_split(rng.permutation(len(samples)), devices)
        return [np.sort(part).astype(np.int64) for part in parts]
