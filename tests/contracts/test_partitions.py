"""What every partition must be: a partition, the same for the same seed; and the laws of Dirichlet's alpha."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedvit.data.partition import PARTITIONS, partition

# what lets a partition deal out very few samples too
FEW = {"dirichlet": {"min_samples": 0}}

labels_of_classes = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(
    lambda counts: np.repeat(np.arange(len(counts)), counts)
)


@pytest.mark.parametrize("name", PARTITIONS)
@settings(deadline=None)
@given(labels_of_classes, st.data())
def test_disjoint_complete_and_seeded(name: str, labels: np.ndarray, data: st.DataObject) -> None:
    assume(len(labels) > 0)
    shuffled = np.random.default_rng(0).permutation(labels)
    devices = data.draw(st.integers(1, len(labels)))
    seed = data.draw(st.integers(0, 2**32))
    parts = partition(name, shuffled, devices, seed, **FEW.get(name, {}))
    assert len(parts) == devices
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    again = partition(name, shuffled, devices, seed, **FEW.get(name, {}))
    for part, same in zip(parts, again, strict=True):
        np.testing.assert_array_equal(part, same)


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_deals_otherwise(name: str) -> None:
    labels = np.repeat(np.arange(10), 50)
    first, other = (partition(name, labels, 4, seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", PARTITIONS)
def test_labels_are_left_alone(name: str) -> None:
    labels = np.repeat(np.arange(10), 50)
    before = labels.copy()
    partition(name, labels, 4, 0)
    np.testing.assert_array_equal(labels, before)


@pytest.mark.parametrize("name", PARTITIONS)
def test_one_device_gets_everything(name: str) -> None:
    (part,) = partition(name, np.repeat(np.arange(3), 10), 1, 0)
    np.testing.assert_array_equal(part, np.arange(30))


@pytest.mark.parametrize("cap", [False, True])
@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**32))
def test_large_alpha_approaches_uniform(cap: bool, devices: int, seed: int) -> None:
    """The variance of a share is (1/N)(1 - 1/N) / (alpha N + 1): with alpha 1e10 below 1e-11, so shares are 1/N
    within 1e-4. Of 100 samples, each cut is 100 j / N within .01, rounded down: counts within 2 of 100 / N."""
    labels = np.repeat(np.arange(5), 100)
    for part in partition("dirichlet", labels, devices, seed, alpha=1e10, cap=cap):
        counts = np.bincount(labels[part], minlength=5)
        assert np.abs(counts - 100 / devices).max() <= 2


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_small_alpha_gives_each_class_to_one_device(devices: int, seed: int) -> None:
    """With alpha 1e-9 the chance that a class is visibly divided is about alpha N times a logarithm: below 1e-6."""
    labels = np.repeat(np.arange(20), 50)
    parts = partition("dirichlet", labels, devices, seed, alpha=1e-9, min_samples=0)
    for label in range(20):
        assert max(int((labels[part] == label).sum()) for part in parts) == 50


def test_alpha_orders_how_uneven_devices_are() -> None:
    """Mean over devices and 20 seeds of the largest class's share: 1 for one class each, 1/10 for uniform."""
    labels = np.repeat(np.arange(10), 200)

    def largest_share(alpha: float) -> float:
        shares = [
            np.bincount(labels[part], minlength=10).max() / len(part)
            for seed in range(20)
            for part in partition("dirichlet", labels, 5, seed, alpha=alpha)
        ]
        return float(np.mean(shares))

    few, some, many = (largest_share(alpha) for alpha in (0.1, 1.0, 100.0))
    assert few > some > many
    assert few > 0.4
    assert many < 0.15
