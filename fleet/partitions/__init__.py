"""Partitions: rules that deal a data set out to devices, so that simulated data are as skewed as real ones.

An installed package adds its own by entry points (docs/plugins.md).
"""

import typing
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from fedvit import plugins
from fedvit.choices import suggest_names
from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.coarse_iid import CoarseIid
from fleet.partitions.dealing import Partition, check_parts
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


def partition_names() -> list[str]:
    """List all partitions, those of installed packages included, of which some may be unusable."""
    return plugins.list_names(plugins.PARTITIONS, PARTITIONS)


def partition_class(name: str) -> type[Partition]:
    """Return the class of a partition, imported from its package where it is not one of fedvit's.

    Raises ConfigError when there is no such partition, or when its package declares something that cannot be used.
    """
    entry = plugins.find_entry(plugins.PARTITIONS, name, PARTITIONS)
    if entry is None and name not in PARTITIONS:
        raise ConfigError("FV2002", f"partition {name!r} is not known{suggest_names(name, partition_names())}")
    if entry is None:
        return PARTITIONS[name]
    return plugins.load_class(plugins.PARTITIONS, entry, Partition)  # type: ignore[type-abstract]


def partition_options(name: str) -> dict[str, Option]:
    """Return the options of a partition, with their defaults. Raises ConfigError for an unknown name."""
    kind, entry = partition_class(name), plugins.find_entry(plugins.PARTITIONS, name, PARTITIONS)
    return asdict(kind() if entry is None else plugins.make(plugins.PARTITIONS, entry, kind))


def make_partition(name: str, **options: Option | str) -> Partition:
    """Make the partition of that name; a value may be a text of a command line.

    Raises ConfigError for unknown names, unknown options and bad values.
    """
    defaults = partition_options(name)
    if unknown := [option for option in options if option not in defaults]:
        raise ConfigError(
            "FV2002", f"partition {name} has no option {unknown[0]!r}; it has: {', '.join(defaults) or 'none'}"
        )
    kind = partition_class(name)
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for option, value in options.items():
        try:
            values[option] = msgspec.convert(value, types[option], strict=False)
        except msgspec.ValidationError as error:
            wanted = type(defaults[option]).__name__
            raise ConfigError("FV2002", f"partition {name}: {option} is {value!r}, expected {wanted}") from error
    return kind(**values)


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
    """Deal samples out by a rule, as `partition` does by a name. Raises ConfigError also if its parts overlap."""
    annotations = samples if isinstance(samples, Annotations) else Annotations(labels=samples)
    if devices < 1:
        raise ConfigError("FV2003", f"partition: devices is {devices}, expected >= 1")
    if devices > len(annotations):
        raise ConfigError("FV2003", f"partition: {devices} devices, but only {len(annotations)} samples")
    if seed < 0:
        raise ConfigError("FV2003", f"partition: seed is {seed}, expected >= 0")
    parts = rule(annotations, devices, np.random.default_rng(seed))
    check_parts(parts, len(annotations), devices, rule.leaves_out)
    return parts
