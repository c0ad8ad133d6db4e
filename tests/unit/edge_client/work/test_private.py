"""What a device does to a result before it leaves."""

import numpy as np
import pytest

from edge_client.work.private import clip_update, noisy_rows
from edge_client.work.runtime import Seeds
from fedvit.program import Collect

SEEDS = Seeds(0, 1, "pi")


def test_updates_are_shortened_together_if_they_are_long() -> None:
    tensors = {"w": np.float32([3, 4])}
    assert clip_update(tensors, 5.0) is tensors
    # long updates are shortened together: 3, 4, 12 are 13 long: to 6.5 they are halved, and stay float32
    got = clip_update({"w": np.float32([3, 4]), "v": np.float32([[12]])}, 6.5)
    np.testing.assert_allclose(got["w"], [1.5, 2])
    np.testing.assert_allclose(got["v"], [[6]])
    assert got["w"].dtype == np.float32


def test_rows_are_clipped_one_by_one_and_get_the_promised_noise() -> None:
    values = np.ones((2, 3), np.float32)
    assert noisy_rows(values, Collect("features", (3,)), SEEDS) is values
    # each row is clipped by itself: [3, 4] to length 1, [0, 0.5] stays; no noise
    got = noisy_rows(np.float32([[3, 4], [0, 0.5]]), Collect("features", (2,), clip=1.0), SEEDS)
    np.testing.assert_allclose(got, [[0.6, 0.8], [0, 0.5]], rtol=1e-6)
    assert got.dtype == np.float32
    # noise is that of the promise: std = noise * clip = 0.5 * 4 in every number
    got = noisy_rows(np.zeros((400, 10, 50), np.float32), Collect("f", (10, 50), clip=4.0, noise=0.5), SEEDS)
    assert got.shape == (400, 10, 50)
    assert got.std() == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("rehearsal", [True, False])
def test_only_deterministic_noise_can_be_repeated(rehearsal: bool) -> None:
    collect = Collect("features", (3,), clip=1.0, noise=1.0, rehearsal=rehearsal)
    first, again = (noisy_rows(np.zeros((2, 3), np.float32), collect, SEEDS) for _ in range(2))
    assert np.array_equal(first, again) == rehearsal


def test_nothing_to_send() -> None:
    assert noisy_rows(np.zeros((0, 3), np.float32), Collect("f", (3,), clip=1.0, noise=1.0), SEEDS).shape == (0, 3)
