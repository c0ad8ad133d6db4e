"""How the images of one device are split into those that train and those that test."""

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError


def split_train_test(
    indices: Indices, labels: Indices, test_share: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Split every class into (train, test), both ascending.

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
