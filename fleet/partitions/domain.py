"""Devices with the same classes in different domains, for instance photographs and drawings."""

from dataclasses import dataclass

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition, refuse_concentration
from fleet.partitions.dirichlet import Dirichlet


@dataclass(frozen=True, kw_only=True)
class Domain(Partition):
    """The j-th `per_domain` devices in a row get the j-th domain, whole (pFedPG) or divided among them.

    A domain is divided by the capped Dirichlet partition; FedPerfix on Office-Home: per_domain=4, alpha=1,
    min_samples=133.
    """

    per_domain: int = 1  # devices of one domain, >= 1 (q)
    alpha: float = 1.0  # concentration inside a domain, > 0; unused where per_domain is 1
    min_samples: int = 10  # the least a device gets where a domain is divided

    def __post_init__(self) -> None:
        if self.per_domain < 1:
            raise ConfigError("FV2003", f"partition: per_domain is {self.per_domain}, expected >= 1")
        refuse_concentration("alpha", self.alpha)
        if self.min_samples < 0:
            raise ConfigError("FV2003", f"partition: min_samples is {self.min_samples}, expected >= 0")

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when there are no domains, or `devices` is not `per_domain` for each of them."""
        if samples.domains is None:
            raise ConfigError(
                "FV2003",
                "partition domain needs the domain of every sample, the data set has none;"
                " expected folders DOMAIN/CLASS/, or a Parquet column 'domain'",
            )
        domains = np.unique(samples.domains)
        if devices != len(domains) * self.per_domain:
            raise ConfigError(
                "FV2003",
                f"partition domain: {devices} devices, expected {len(domains) * self.per_domain}:"
                f" per_domain {self.per_domain} for each of the {len(domains)} domains",
            )
        return [
            part
            for domain in domains
            for part in self._divide(samples, np.flatnonzero(samples.domains == domain).astype(np.int64), rng)
        ]

    def _divide(self, samples: Annotations, inside: Indices, rng: np.random.Generator) -> list[Indices]:
        if self.per_domain == 1:
            return [inside]
        divide = Dirichlet(alpha=self.alpha, cap=True, min_samples=self.min_samples)
        try:
            parts = divide(Annotations(labels=samples.labels[inside]), self.per_domain, rng)
        except ConfigError as error:
            raise ConfigError("FV2003", f"partition domain, in a domain of {len(inside)} samples: {error}") from error
        return [inside[part] for part in parts]
