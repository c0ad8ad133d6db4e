"""An optimizer's memory in 8 bits: how far its numbers are from those in 32, and what training with them reaches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from edge_client.work.packed_slots import BLOCK, PackedSlot
from fedvit.tensors import Array

SIZES = st.floats(0, 1e6, width=32).map(lambda size: 0.0 if size < 1e-30 else size)


def _keep(slot: str, values: Array, seed: int = 0) -> Array:
    packed, kept = PackedSlot(slot, len(values)), np.empty_like(values)
    packed.pack(0, values.copy(), np.random.default_rng(seed))
    packed.unpack(0, kept)
    return kept


@given(of_numpy.arrays(np.float32, 12, elements=SIZES), st.integers(0, 9))
def test_numbers_are_as_near_as_their_codes(drawn: Array, seed: int) -> None:
    sizes = np.resize(drawn, BLOCK)
    scale = float(sizes.max())
    signed = np.where(np.arange(BLOCK) % 2, sizes, -sizes)
    means, squares = _keep("exp_avg", signed), _keep("exp_avg_sq", sizes, seed)
    assert np.abs(means - signed).max() <= scale / 127 * 1.001
    assert (np.sign(means) * np.sign(signed) >= 0).all()
    roots = (squares / scale) ** 0.25 - (sizes / scale) ** 0.25 if scale else squares
    assert np.abs(roots).max() <= 1 / 255 * 1.001
    assert ((squares > 0) >= (sizes > 1e-12 * scale)).all()  # an update divides by them
    assert _keep("exp_avg", np.zeros(BLOCK, np.float32)).max() == 0


def test_blocks_have_scales_of_their_own_and_a_quarter_of_the_bytes() -> None:
    draw = np.random.default_rng(0)
    values = (draw.normal(size=(4, BLOCK)) * [[1e-9], [1e-3], [1.0], [1e6]]).astype(np.float32)
    packed, kept = PackedSlot("momentum_buffer", 4 * BLOCK), np.empty(2 * BLOCK, np.float32)
    packed.pack(2 * BLOCK, values[2:].reshape(-1), draw)
    packed.pack(0, values[:2].reshape(-1), draw)
    for first in (0, 2):
        packed.unpack(first * BLOCK, kept)
        errors = np.abs(kept.reshape(2, BLOCK) - values[first : first + 2]).max(axis=1)
        assert (errors <= np.abs(values[first : first + 2]).max(axis=1) / 127).all()
    assert packed.nbytes < 0.26 * values.nbytes


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-5])
def test_a_mean_of_squares_follows_gradients_that_become_small(share: float) -> None:
    """A step takes away a thousandth, less than the distance of two codes; beside a number that does not change."""
    packed, values = PackedSlot("exp_avg_sq", BLOCK), np.full(BLOCK, share, np.float32)
    values[0], draw = 1.0, np.random.default_rng(1)
    for _ in range(1000):
        values[1:] *= 0.999
        packed.pack(0, values, draw)
        packed.unpack(0, values)
    assert values[0] == 1
    assert values[1:].mean() == pytest.approx(share * 0.999**1000, rel=0.1)
