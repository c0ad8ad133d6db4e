"""Label skew by one number, the partition that most papers use."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition, gather, refuse_concentration

DRAWS = 1000
"""Most draws of a random partition."""


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Each class is dealt out in shares p ~ Dir(alpha): small alpha gives a device few classes, large alpha all.

    Plain variant (EFTViT, pFedPG): cap=False, min_samples=0, one draw; folders are refused when it leaves a device
    without samples. Any other minimum, the default among them, repeats the draw until it holds, so that very uneven
    draws do not occur: 1 is nearest to the plain variant. Capped variant (PFLlib, FedPerfix, FedTP): cap=True, a
    device that has its fair number of samples gets nothing of the following classes.
    """

    alpha: float = 0.3  # concentration, > 0
    cap: bool = False
    min_samples: int = 10  # draw again until every device has as many

    def __post_init__(self) -> None:
        refuse_concentration("alpha", self.alpha)
        if self.min_samples < 0:
            raise ConfigError("FV2003", f"partition: min_samples is {self.min_samples}, expected >= 0")

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when `min_samples` cannot be had, or did not come up in `DRAWS` draws."""
        labels = samples.labels
        if devices * self.min_samples > len(labels):
            raise ConfigError(
                "FV2003",
                f"partition: {devices} devices with at least {self.min_samples} samples each need"
                f" {devices * self.min_samples} samples, the data set has {len(labels)}",
            )
        for _ in range(DRAWS):
            parts = self._draw(labels, devices, rng)
            if parts is not None and min(len(part) for part in parts) >= self.min_samples:
                return parts
        raise ConfigError(
            "FV2003",
            f"partition: {DRAWS} draws with alpha {self.alpha} never gave each of {devices} devices"
            f" {self.min_samples} of the {len(labels)} samples; raise alpha, lower min_samples"
            f"{'' if self.cap else ', set cap'} or use fewer devices",
        )

    def _draw(self, labels: Indices, devices: int, rng: np.random.Generator) -> list[Indices] | None:
        """One draw; None when all devices have reached the cap."""
        dealt: list[list[Indices]] = [[] for _ in range(devices)]
        sizes = np.zeros(devices, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(devices, self.alpha))
            if self.cap:
                shares = np.where(sizes >= len(labels) / devices, 0.0, shares)
            if not shares.sum() > 0:
                return None
            cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(np.int64)[:-1]
            for device, piece in enumerate(np.split(members, cuts)):
                dealt[device].append(piece)
                sizes[device] += len(piece)
        return [gather(pieces) for pieces in dealt]
