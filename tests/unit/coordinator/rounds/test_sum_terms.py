"""The clip of a private secure sum moves to the quantile of the updates, also through the noise of their count."""

from pathlib import Path

import numpy as np
import pytest

from coordinator.config import RunConfig
from coordinator.config.privacy import PrivacyConfig
from coordinator.config.sums import SumsConfig
from coordinator.record.record import Record
from coordinator.record.tables import SavedState
from coordinator.rounds.sum_terms import find_noise, make_terms
from fedvit.secure.layout import Layout
from fedvit.secure.noise import find_range
from fedvit.wire.messages import SumNoise
from tests.support.records import RUN, begin_run

NORMS = np.linspace(0.2, 4.0, 200)
"""Norms of the devices' updates, the same in each round."""


def close_round(store: Record, number: int, clip: float, within: float) -> None:
    """Close a round with the figures that a sum writes."""
    store.rounds.open(RUN, number, [], 0)
    store.rounds.close(RUN, number, SavedState({}, None, {}), {"sum_clip": clip, "sum_within": within})


@pytest.mark.parametrize("begin", [0.05, 12.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_clip_moves_to_the_quantile(tmp_path: Path, begin: float, quantile: float) -> None:
    privacy = PrivacyConfig(noise_multiplier=1.0, clip=begin, clip_quantile=quantile)
    config = RunConfig(method="fedavg", devices=len(NORMS), cohort=1.0, secure=True, rounds=200, privacy=privacy)
    store, random = begin_run(tmp_path), np.random.default_rng(3)
    clips = []
    for number in range(4, 164):
        noise = find_noise(store, RUN, config, number)
        assert noise
        counted = float((noise.clip >= NORMS).sum() + noise.counting * random.standard_normal())
        close_round(store, number, noise.clip, counted / len(NORMS))
        clips.append(noise.clip)
    store.close()
    assert clips[0] == begin
    assert np.median(clips[-30:]) == pytest.approx(np.quantile(NORMS, quantile), rel=0.15)


def test_clip_and_count_share_the_noise(tmp_path: Path) -> None:
    """Both together cost what the multiplier says: z^-2 = z_update^-2 + (2 z_count)^-2."""
    privacy = PrivacyConfig(noise_multiplier=0.8, clip=1.0, clip_quantile=0.5)
    config = RunConfig(method="fedavg", devices=100, cohort=1.0, secure=True, privacy=privacy)
    store = begin_run(tmp_path)
    noise = find_noise(store, RUN, config, 4)
    store.close()
    assert noise
    assert noise.multiplier > 0.8
    assert noise.multiplier**-2 + (2 * noise.counting) ** -2 == pytest.approx(0.8**-2)


def test_neighbours_follow_the_devices_that_are_expected_to_leave() -> None:
    """The invited devices count, not those that the run waits for."""
    layout = Layout({"w": (2,)}, 1)
    config = RunConfig(method="fedavg", devices=2000, secure=True, sums=SumsConfig(leaving=0.05))
    assert [make_terms(layout, config, devices, 50).neighbours for devices in (20, 100, 1000)] == [20, 59, 77]
    noisy = make_terms(layout, config, 1000, 50, noise=SumNoise(1.0, 0.5))
    assert noisy.range == find_range(SumNoise(1.0, 0.5), 1000, 77)
    assert make_terms(layout, RunConfig(method="fedavg", secure=True), 1000, 50).neighbours == 20
