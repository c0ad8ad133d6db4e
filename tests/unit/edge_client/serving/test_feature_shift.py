"""Drift of the mean of features of real handwriting: pictures until an alert, and alerts without drift."""

from collections.abc import Callable

import numpy as np
import pytest

from edge_client.serving.drift import DriftWatch, Observation
from edge_client.serving.feature_shift import FeatureShift
from export.bundle.reference import find_centres
from fedvit.data.images import Pixels
from tests.support.served import Scene, split_digits

SEEDS = range(4)


@pytest.fixture
def start(scene: Callable[[int], Scene]) -> Callable[[int], FeatureShift]:
    def start(seed: int) -> FeatureShift:
        centres = scene(seed).reference.centres
        assert centres
        return FeatureShift(centres)

    return start


def see_all(made: Scene, pictures: Pixels) -> list[Observation]:
    return [made.see(pixels) for pixels in pictures]


def test_small_shift_of_the_mean_raises_an_alert() -> None:
    """Each feature by half its deviation: most pictures lie no further from the mean than before."""
    rng = np.random.default_rng(0)
    test, later = rng.normal(size=(50, 192)), rng.normal(size=(200, 192))
    centres = find_centres(test.astype(np.float32), np.arange(50) % 2, 2)
    assert centres
    for offset, drifts in ((0.0, False), (0.5, True)):
        shift = FeatureShift(centres)
        assert any(shift.add(row.astype(np.float32), 0) for row in later + offset) is drifts


def test_no_alert_without_a_shift(scene: Callable[[int], Scene], start: Callable[[int], FeatureShift]) -> None:
    """At most one in 10,000 pictures, over all seeds."""
    alerts = pictures = 0
    for seed in SEEDS:
        seen, shift = see_all(scene(seed), split_digits(seed).stream.pixels), start(seed)
        order = np.random.default_rng(seed).integers(len(seen), size=20_000)
        alerts += sum(shift.add(seen[row].features, seen[row].best) for row in order)
        pictures += len(order)
    assert alerts <= pictures / 10_000


def test_frames_of_one_new_thing_are_no_drift(
    scene: Callable[[int], Scene], start: Callable[[int], FeatureShift]
) -> None:
    """Its peculiarities do not cancel out, however long a camera sees it."""
    made, shift = scene(0), start(0)
    noise = np.random.default_rng(0).integers(-3, 4, size=(500, 16, 16, 3))
    thing = split_digits(0).unknown.pixels[0].astype(np.int16)
    frames = see_all(made, np.clip(thing + noise, 0, 255).astype(np.uint8))
    assert not any(shift.add(frame.features, frame.best) for frame in frames)


def test_alert_names_features_and_the_mean_begins_anew(
    scene: Callable[[int], Scene], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made, watch = scene(0), DriftWatch(tmp_path_factory.mktemp("watch"))
    watch.use("digits-1", made.reference, made.temperature)
    for seen in see_all(made, split_digits(0).unknown.pixels):
        watch.add(seen)
    assert "features" in watch.alerts
    watch.use("digits-2", made.reference, made.temperature)
    for seen in see_all(made, split_digits(0).stream.pixels[:200]):
        watch.add(seen)
    assert "features" not in watch.alerts
