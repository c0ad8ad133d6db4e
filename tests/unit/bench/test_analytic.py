"""Images of the analytic bench, and its regression in one place."""

import numpy as np

from bench.analytic import draw_images


def test_each_class_is_drawn() -> None:
    """Images of a draw without a class are the same with one of that class in place of the last one."""
    labels = np.repeat(np.arange(40), [97, *[3] * 38, 1])
    for seed in range(30):
        drawn = draw_images(labels, 60, seed)
        plain = np.random.default_rng(seed).permutation(len(labels))[:60]
        missing = np.setdiff1d(labels, labels[plain])
        assert len(np.unique(drawn)) == 60
        assert set(labels[drawn]) == set(labels)
        assert len(np.setdiff1d(plain, drawn)) == len(missing)
