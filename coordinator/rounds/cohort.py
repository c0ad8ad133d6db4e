"""The choice of devices for a round."""

from collections.abc import Iterable, Mapping

import numpy as np

from coordinator.record.tables import Asked


def cohort_size(cohort: float | int, devices: int) -> int:
    """Number of devices in a cohort: `cohort` is a share of `devices` (float, rounded, at least one) or a number.

    >>> cohort_size(0.25, 10), cohort_size(0.01, 10), cohort_size(8, 3)
    (2, 1, 3)
    """
    wanted = max(1, round(cohort * devices)) if isinstance(cohort, float) else cohort
    return min(wanted, devices)


def select_uniform(devices: Iterable[str], wanted: int, seed: int, round_number: int, *purpose: int) -> list[str]:
    """A uniformly random subset, sorted.

    The same devices, seed and round always give the same cohort, in any order of arrival; another `purpose` gives an
    independent draw.

    >>> select_uniform(["c", "a", "b"], 3, seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    names = sorted(devices)
    if wanted >= len(names):
        return names
    draw = np.random.default_rng([seed, round_number, *purpose])
    return sorted(str(name) for name in draw.choice(names, wanted, replace=False))


def select_fair(
    devices: Iterable[str], wanted: int, seed: int, round_number: int, before: Mapping[str, Asked]
) -> list[str]:
    """Devices that were not asked for the longest time, sorted by name; ties: asked least often, then at random.

    >>> select_fair(["a", "b", "c"], 1, 0, 3, {"a": Asked(1, 1), "b": Asked(2, 1), "c": Asked(1, 2)})
    ['a']
    """
    names = sorted(devices)
    random_order = np.random.default_rng([seed, round_number]).permutation(len(names))
    turns = sorted(
        (before.get(name, Asked(0, 0)), int(rank), name) for name, rank in zip(names, random_order, strict=True)
    )
    return sorted(name for _, _, name in turns[:wanted])
