"""Partitions: rules that deal a data set out to devices, so that simulated data are as skewed as real ones."""

from dataclasses import asdict, fields
from typing import Any

import msgspec
import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.coarse_iid import CoarseIid
from fleet.partitions.dealing import Partition
from fleet.partitions.dirichlet import Dirichlet
from fleet.partitions.disjoint import Disjoint
from fleet.partitions.domain import Domain
from fleet.partitions.feature_noise import FeatureNoise
from fleet.partitions.iid import Iid
from fleet.partitions.natural import Natural
from fleet.partitions.pachinko import Pachinko
from fleet.partitions.pathological import Pathological

PARTITIONS: dict[str, type[Partition]] = {
    "dirichlet": Dirichlet,
    "iid": Iid,
    "pathological": Pathological,
    "pachinko": Pachinko,
    "coarse_iid": CoarseIid,
    "disjoint": Disjoint,
    "domain": Domain,
    "feature_noise": FeatureNoise,
    "natural": Natural,
}

Option = bool | int | float


def partition_options(name: str) -> dict[str, Option]:
    """Return the options of a partition, with their defaults. Raises ConfigError for an unknown name."""
    if name not in PARTITIONS:
        raise ConfigError("FV2002", f"partition {name!r} is not known; there are: {', '.join(PARTITIONS)}")
    return asdict(PARTITIONS[name]())


def make_partition(name: str, **options: Option | str) -> Partition:
    """Make the partition of that name; a value may be a text of a command line.

    Raises ConfigError for unknown names, unknown options and bad values.
    """
    defaults = partition_options(name)
    if unknown := [option for option in options if option not in defaults]:
        raise ConfigError(
            "FV2002", f"partition {name} has no option {unknown[0]!r}; it has: {', '.join(defaults) or 'none'}"
        )
    types = {field.name: field.type for field in fields(PARTITIONS[name])}
    values: dict[str, Any] = {}
    for option, value in options.items():
        try:
            values[option] = msgspec.convert(value, types[option], strict=False)
        except msgspec.ValidationError as error:
            kind = type(defaults[option]).__name__
            raise ConfigError("FV2002", f"partition {name}: {option} is {value!r}, expected {kind}") from error
    return PARTITIONS[name](**values)


def partition(
    name: str, samples: Indices | Annotations, devices: int, seed: int, **options: Option | str
) -> list[Indices]:
    """Deal samples out to `devices` devices; an array of labels is enough for most partitions.

    Returns one ascending array of indices per device; no sample is in two. The same arguments always give
    the same arrays. Raises ConfigError for bad values, naming them.

    >>> first, second = partition("iid", np.array([0, 0, 1, 1, 1]), devices=2, seed=0)
    >>> len(first), len(second), sorted([*first.tolist(), *second.tolist()])
    (3, 2, [0, 1, 2, 3, 4])
    """
    return deal_out(make_partition(name, **options), samples, devices, seed)


def deal_out(rule: Partition, samples: Indices | Annotations, devices: int, seed: int) -> list[Indices]:
    """Deal samples out by a rule, as `partition` does by a name."""
    annotations = samples if isinstance(samples, Annotations) else Annotations(labels=samples)
    if devices < 1:
        raise ConfigError("FV2003", f"partition: devices is {devices}, expected >= 1")
    if devices > len(annotations):
        raise ConfigError("FV2003", f"partition: {devices} devices, but only {len(annotations)} samples")
    if seed < 0:
        raise ConfigError("FV2003", f"partition: seed is {seed}, expected >= 0")
    return rule(annotations, devices, np.random.default_rng(seed))
