"""A device for each natural source of data: a speaking role, a writer, a site."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Devices get everything of one source each; sources are drawn from those with `min_samples` samples or more.

    Samples of a text are its characters. Sources that were not drawn are left out.
    """

    leaves_out = True

    min_samples: int = 1  # the least that a source must have, >= 1

    def __post_init__(self) -> None:
        if self.min_samples < 1:
            raise ConfigError("FV2003", f"partition: min_samples is {self.min_samples}, expected >= 1")

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when there are no sources, or fewer with enough samples than devices."""
        if samples.domains is None:
            raise ConfigError(
                "FV2003",
                "partition natural needs the source of every sample, the data set has none;"
                " expected a text with ROLE: lines, LEAF's JSON, folders SOURCE/CLASS/, or a Parquet column 'domain'",
            )
        counts = np.bincount(samples.domains)
        enough = np.flatnonzero(counts >= self.min_samples)
        if len(enough) < devices:
            raise ConfigError(
                "FV2003",
                f"partition natural: {devices} devices, but only {len(enough)} of {len(counts)} sources have"
                f" {self.min_samples} samples or more, the largest {counts.max()}; use fewer devices, or lower"
                " min_samples",
            )
        chosen = np.sort(rng.choice(enough, devices, replace=False))
        return [np.flatnonzero(samples.domains == source).astype(np.int64) for source in chosen]
