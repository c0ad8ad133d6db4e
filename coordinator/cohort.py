"""Who is asked in a round."""

from collections.abc import Iterable

import numpy as np


def select_cohort(devices: Iterable[str], cohort: float | int, seed: int, round_number: int) -> list[str]:
    """A uniformly random subset, sorted: a share of the devices (float, rounded, at least one) or a number.

    The same devices, seed and round always give the same cohort, whatever the order of arrival.

    >>> select_cohort(["c", "a", "b"], 1.0, seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    names = sorted(devices)
    wanted = max(1, round(cohort * len(names))) if isinstance(cohort, float) else cohort
    if wanted >= len(names):
        return names
    draw = np.random.default_rng([seed, round_number])
    return sorted(str(name) for name in draw.choice(names, wanted, replace=False))
