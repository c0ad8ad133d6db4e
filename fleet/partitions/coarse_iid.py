"""One group of classes per device, evenly divided among the devices of a group."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition, gather, refuse_empty


@dataclass(frozen=True, kw_only=True)
class CoarseIid(Partition):
    """The j-th devices in a row get the j-th coarse label, equal random shares of each of its fine labels.

    Source: FedTP, figure 9: CIFAR-100 on 100 devices, 5j..5j+4 have coarse label j. Here any multiple of
    the number of coarse labels will do. Shares of a fine label differ by at most one sample.
    """

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when there are no coarse labels, or `devices` is not a multiple of their number."""
        if samples.coarse_labels is None:
            raise ConfigError(
                "FV2003", "partition coarse_iid needs coarse labels, the data set has none (CIFAR-100 has)"
            )
        groups = np.unique(samples.coarse_labels)
        if devices % len(groups):
            raise ConfigError(
                "FV2003",
                f"partition coarse_iid: {devices} devices, expected a multiple of the {len(groups)} coarse labels",
            )
        parts = []
        for group in groups:
            dealt: list[list[Indices]] = [[] for _ in range(devices // len(groups))]
            inside = np.flatnonzero(samples.coarse_labels == group)
            for fine in np.unique(samples.labels[inside]):
                members = rng.permutation(inside[samples.labels[inside] == fine])
                for pieces, piece in zip(dealt, np.array_split(members, len(dealt)), strict=True):
                    pieces.append(piece)
            parts += [gather(pieces) for pieces in dealt]
        return refuse_empty("coarse_iid", parts)
