"""Which features leave a device: counts, epochs, and what never does."""

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_client.work.sampler import SAMPLERS, BalancedSampler, MedianSampler, make_sampler
from fedvit.program import Collect


def collect(
    counts: Sequence[int],
    epochs: int,
    *,
    threshold: float = 1.0,
    unreadable: frozenset[int] = frozenset(),
    seed: int = 0,
    kind: type[MedianSampler] = MedianSampler,
) -> list[tuple[int, int, int]]:
    """(label, epoch, row) of everything that is kept: a sample's value tells its epoch and its row.

    `counts[c]` images of class c; batches of 3, in another order each epoch.
    """
    labels = np.repeat(np.arange(len(counts)), counts)
    draw = np.random.default_rng(seed)
    sampler = kind(labels, epochs, threshold, draw)
    for epoch in range(epochs):
        order = draw.permutation(len(labels))
        for first in range(0, len(order), 3):
            rows = order[first : first + 3]
            readable = np.array([row not in unreadable for row in rows])
            values = np.stack([np.full(len(rows), epoch), rows], axis=1).astype(np.float32)
            sampler.record(epoch, rows, readable, values)
    values, kept_labels = sampler.collect((2,))
    assert kept_labels.dtype == np.int64
    assert values.dtype == np.float32
    return [(int(label), int(epoch), int(row)) for label, (epoch, row) in zip(kept_labels, values, strict=True)]


def per_class(kept: list[tuple[int, int, int]], classes: int) -> list[int]:
    return np.bincount([label for label, _, _ in kept], minlength=classes).tolist()


def test_the_table_of_the_specification() -> None:
    """n_c = 1, 4, 10, 10, 30 and E = 5: the median is 10.

    1 < 10: all epochs, 5 * 1 = 5 <= 10 features, all kept. 4 < 10: 5 * 4 = 20 candidates, 10 drawn.
    10 and 10: the last epoch's 10. 30: 10 of the last epoch's 30.
    """
    kept = collect([1, 4, 10, 10, 30], epochs=5)
    assert per_class(kept, 5) == [5, 10, 10, 10, 10]


def test_a_minority_gives_features_of_several_epochs() -> None:
    """1 image, 5 epochs: one feature of each. 4 images: 10 of 20 candidates, so at least 3 epochs (4 an epoch)."""
    kept = collect([1, 4, 10, 10, 30], epochs=5)
    assert sorted(epoch for label, epoch, _ in kept if label == 0) == [0, 1, 2, 3, 4]
    assert len({epoch for label, epoch, _ in kept if label == 1}) >= 3


def test_what_is_drawn_follows_from_the_seed() -> None:
    counts = [4, 10, 30]
    assert collect(counts, epochs=5, seed=1) == collect(counts, epochs=5, seed=1)
    assert sorted(collect(counts, epochs=5, seed=1)) != sorted(collect(counts, epochs=5, seed=2))


def test_unreadable_images_are_left_out() -> None:
    """n_c = 2, 2, 2, E = 1: the median is 2, everything is chosen; rows 0, 1 (class 0) and 3 (class 1) fail."""
    kept = collect([2, 2, 2], epochs=1, unreadable=frozenset({0, 1, 3}))
    assert sorted(kept) == [(1, 0, 2), (2, 0, 4), (2, 0, 5)]


def test_values_are_copies() -> None:
    """onnxruntime may write its next output into the same memory."""
    sampler = MedianSampler(np.array([0, 0]), 1, 1.0, np.random.default_rng(0))
    output = np.ones((2, 3), np.float32)
    sampler.record(0, np.array([0, 1]), np.array([True, True]), output)
    output[:] = 7
    np.testing.assert_array_equal(sampler.collect((3,))[0], np.ones((2, 3)))


def test_sampler_is_the_one_that_the_program_names() -> None:
    """Every name that a Program may have is known here."""
    collect = Collect("features", (3,), 0.5, sampler="median")
    made = make_sampler(collect, np.array([0, 0, 0, 0]), 1, np.random.default_rng(0))
    assert isinstance(made, MedianSampler)
    assert made.limit == 2
    assert set(SAMPLERS) == set(get_args(get_type_hints(Collect)["sampler"]))


def test_without_images_nothing_is_collected() -> None:
    sampler = MedianSampler(np.zeros(0, np.int64), 3, 1.0, np.random.default_rng(0))
    values, labels = sampler.collect((4, 2))
    assert (values.shape, values.dtype) == ((0, 4, 2), np.dtype(np.float32))
    assert (labels.shape, labels.dtype) == ((0,), np.dtype(np.int64))


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    epochs=st.integers(1, 4),
    threshold=st.sampled_from([0.5, 1.0, 1.7, 3.0]),
    seed=st.integers(0, 1000),
)
def test_counts_for_any_device(counts: list[int], epochs: int, threshold: float, seed: int) -> None:
    """u_c = min(limit, E * n_c): a class below the limit has E * n_c candidates, any other at least the limit.

    limit = max(1, int(floor(median of the present) * threshold)). And nothing is sent twice.
    """
    kept = collect(counts, epochs, threshold=threshold, seed=seed)
    present = sorted(count for count in counts if count)
    middle: Any = present[(len(present) - 1) // 2 : len(present) // 2 + 1]
    limit = max(1, int(sum(middle) // len(middle) * threshold)) if middle else 0
    assert per_class(kept, len(counts)) == [min(limit, epochs * count) for count in counts]
    assert len({(epoch, row) for _, epoch, row in kept}) == len(kept)
    labels = np.repeat(np.arange(len(counts)), counts)
    assert all(labels[row] == label for label, _, row in kept)
    assert all(epoch == epochs - 1 for label, epoch, _ in kept if counts[label] >= limit)


# --- balanced -----------------------------------------------------------------------------------------


def test_balanced_takes_what_the_smallest_class_can_give() -> None:
    """n_c = 1, 4, 10, 10, 30 and E = 5: the median sampler takes 5 of the first class and 10 of the others."""
    assert per_class(collect([1, 4, 10, 10, 30], epochs=5, kind=BalancedSampler), 5) == [5] * 5


@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    epochs=st.integers(1, 4),
    threshold=st.sampled_from([0.5, 1.0, 3.0]),
    unreadable=st.frozensets(st.integers(0, 40), max_size=8),
    seed=st.integers(0, 1000),
)
def test_balanced_counts_are_equal_whatever_a_device_has(
    counts: list[int], epochs: int, threshold: float, unreadable: frozenset[int], seed: int
) -> None:
    """Classes of which no image can be read count as absent."""
    kept = collect(
        counts, epochs, threshold=threshold, unreadable=unreadable, seed=seed, kind=BalancedSampler
    )  # fmt: skip
    sent = {count for count in per_class(kept, len(counts)) if count}
    assert len(sent) <= 1
    assert set(kept) <= {(label, epoch, row) for label, epoch, row in kept if row not in unreadable}
    assert len(set(kept)) == len(kept)
