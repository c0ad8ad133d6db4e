"""No class on two devices."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class Disjoint(Partition):
    """The classes are cut at random into one group per device; a device gets all samples of its group (pFedPG)."""

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when the classes cannot be divided among the devices without a rest."""
        classes = np.unique(samples.labels)
        if len(classes) % devices:
            fitting = [str(count) for count in range(1, len(classes) + 1) if len(classes) % count == 0]
            raise ConfigError(
                "FV2003",
                f"partition disjoint: {len(classes)} classes cannot be divided among {devices} devices;"
                f" expected devices to be one of {', '.join(fitting)}",
            )
        groups = np.split(rng.permutation(classes), devices)
        return [np.flatnonzero(np.isin(samples.labels, group)).astype(np.int64) for group in groups]
