"""How a data set is dealt out to devices, so that a fleet on one machine is as uneven as a real one.

A partition is a frozen dataclass of its options; called with labels it returns one array of sample
indices per device: disjoint, together everything, ascending, and the same for the same generator state.
"""

import math
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError

DRAWS = 1000
"""How often a random partition is drawn before it is given up."""


class Partition(Protocol):
    """Deal samples out: labels (n,) -> indices per device."""

    def __call__(self, labels: Indices, devices: int, rng: np.random.Generator) -> list[Indices]: ...


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Each class is dealt out in shares p ~ Dir(alpha): small alpha gives a device few classes, large alpha all.

    Plain variant (EFTViT, pFedPG): cap=False, min_samples=0. Capped variant (PFLlib, FedPerfix, FedTP):
    cap=True, a device that has its fair number of samples gets nothing of the following classes.
    """

    alpha: float = 0.3  # concentration, > 0
    cap: bool = False
    min_samples: int = 10  # draw again until every device has as many; a device without samples is of no use

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"partition: alpha is {self.alpha}, expected a number > 0")
        if self.min_samples < 0:
            raise ConfigError(f"partition: min_samples is {self.min_samples}, expected >= 0")

    def __call__(self, labels: Indices, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when `min_samples` cannot be had, or did not come up in `DRAWS` draws."""
        if devices * self.min_samples > len(labels):
            raise ConfigError(
                f"partition: {devices} devices with at least {self.min_samples} samples each need"
                f" {devices * self.min_samples} samples, the data set has {len(labels)}"
            )
        for _ in range(DRAWS):
            parts = self._draw(labels, devices, rng)
            if parts is not None and min(len(part) for part in parts) >= self.min_samples:
                return parts
        raise ConfigError(
            f"partition: {DRAWS} draws with alpha {self.alpha} never gave each of {devices} devices"
            f" {self.min_samples} of the {len(labels)} samples; raise alpha, lower min_samples"
            f"{'' if self.cap else ', set cap'} or use fewer devices"
        )

    def _draw(self, labels: Indices, devices: int, rng: np.random.Generator) -> list[Indices] | None:
        """One draw; None when the cap leaves nobody to take a class."""
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
        return [np.sort(np.concatenate(pieces)).astype(np.int64) for pieces in dealt]


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Every device gets an equal, random share of everything; sizes differ by at most one."""

    def __call__(self, labels: Indices, devices: int, rng: np.random.Generator) -> list[Indices]:
        parts = np.array_split(rng.permutation(len(labels)), devices)
        return [np.sort(part).astype(np.int64) for part in parts]


PARTITIONS: dict[str, type[Dirichlet] | type[Iid]] = {"dirichlet": Dirichlet, "iid": Iid}


def make_partition(name: str, **options: float) -> Dirichlet | Iid:
    """The partition of that name. Raises ConfigError for unknown names, unknown options and bad values."""
    if name not in PARTITIONS:
        raise ConfigError(f"partition {name!r} is not known; there are: {', '.join(PARTITIONS)}")
    kind = PARTITIONS[name]
    known = [field.name for field in fields(kind)]
    if unknown := [option for option in options if option not in known]:
        raise ConfigError(f"partition {name} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}")
    return kind(**options)  # type: ignore[arg-type]  # the dataclass checks its values


def partition(name: str, labels: Indices, devices: int, seed: int, **options: float) -> list[Indices]:
    """Deal samples with these labels out to `devices` devices.

    Returns one ascending array of indices per device; every sample is in exactly one. The same arguments
    always give the same arrays. Raises ConfigError for bad values, naming them.

    >>> first, second = partition("iid", np.array([0, 0, 1, 1, 1]), devices=2, seed=0)
    >>> len(first), len(second), sorted([*first.tolist(), *second.tolist()])
    (3, 2, [0, 1, 2, 3, 4])
    """
    deal = make_partition(name, **options)
    if devices < 1:
        raise ConfigError(f"partition: devices is {devices}, expected >= 1")
    if devices > len(labels):
        raise ConfigError(f"partition: {devices} devices, but only {len(labels)} samples")
    if seed < 0:
        raise ConfigError(f"partition: seed is {seed}, expected >= 0")
    return deal(labels, devices, np.random.default_rng(seed))


def split_train_test(
    indices: Indices, labels: Indices, test_share: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Set a share of every class apart: (train, test), both ascending.

    `indices` are those of one device, `labels` those of the whole data set. Of n samples of a class,
    n * test_share go to test, rounded, but at least one and never all; a class with a single sample is
    train only. A share of 0 leaves test empty. Raises ConfigError when the share is not in [0, 1).

    >>> train, test = split_train_test(np.arange(6), np.array([0, 0, 0, 0, 1, 2]), 0.25, np.random.default_rng(0))
    >>> len(train), len(test)
    (5, 1)
    """
    if not 0 <= test_share < 1:
        raise ConfigError(f"test share is {test_share}, expected a number in [0, 1)")
    mine = labels[indices]
    chosen = np.zeros(len(indices), dtype=np.bool_)
    if test_share:
        for label in np.unique(mine):
            members = rng.permutation(np.flatnonzero(mine == label))
            wanted = int(len(members) * test_share + 0.5)  # round() would take 2 of 2.5 and 4 of 3.5
            chosen[members[: min(max(wanted, 1), len(members) - 1)]] = True
    return np.sort(indices[~chosen]), np.sort(indices[chosen])
