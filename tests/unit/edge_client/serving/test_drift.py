"""Drift of real handwriting: how many pictures an alert takes, and how often there is one without drift."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from edge_client.serving.drift import (
    ALERT_LASTS,
    LEVEL,
    MAX_DRIFT_BYTES,
    MOST_CLASSES,
    MOST_DAYS,
    Charts,
    DriftWatch,
    NormalScores,
    Observation,
)
from edge_client.serving.feature_shift import FeatureShift
from export.bundle.reference import Quantiles, measure_pixels
from fedvit.data.images import Floats, Pixels
from tests.support.served import Digits, Scene, split_digits

SEEDS = range(4)


def darken(pictures: Pixels) -> Pixels:
    return (pictures * 0.6).astype(np.uint8)


def blur(pictures: Pixels) -> Pixels:
    blurred = [np.asarray(Image.fromarray(each).filter(ImageFilter.GaussianBlur(1.0))) for each in pictures]
    return np.stack(blurred)


SHIFTS: dict[str, Callable[[Digits, Digits], Pixels]] = {
    "darker": lambda known, _: darken(known.pixels),
    "blurred": lambda known, _: blur(known.pixels),
    "new class": lambda known, new: np.concatenate([known.pixels[: len(new.pixels)], new.pixels]),
}
"""Pictures after a shift; half of them are of new classes in the last one."""


@pytest.mark.parametrize("shift", SHIFTS)
def test_shift_raises_an_alert_within_200_pictures(scene: Callable[[int], Scene], shift: str) -> None:
    for seed in SEEDS:
        parts, made = split_digits(seed), scene(seed)
        pictures = SHIFTS[shift](parts.stream, parts.unknown)
        values, seen = made.measure(pictures), [made.see(pixels) for pixels in pictures]
        assert made.reference.centres
        for stream in range(5):
            charts, means = Charts(made.reference), FeatureShift(made.reference.centres)
            order = np.random.default_rng((seed, stream)).integers(len(values), size=200)
            alerts = (charts.add(values[row]) or means.add(seen[row].features, seen[row].best) for row in order)
            assert any(alerts), f"seed {seed}, stream {stream}"


def test_no_alert_without_a_shift(scene: Callable[[int], Scene]) -> None:
    """At most one in 10,000 pictures, over all seeds."""
    alerts = pictures = 0
    for seed in SEEDS:
        made = scene(seed)
        values = made.measure(split_digits(seed).stream.pixels)
        charts = Charts(made.reference)
        order = np.random.default_rng(seed).integers(len(values), size=20_000)
        alerts += sum(bool(charts.add(values[row])) for row in order)
        pictures += len(order)
    assert alerts <= pictures / 10_000


def test_scores_are_those_of_a_normal_distribution() -> None:
    """For any distribution, also one of few values; outliers are bounded."""
    rng = np.random.default_rng(0)
    for values in (rng.exponential(size=4000), rng.integers(3, size=4000)):
        scores = NormalScores(Quantiles.of(values.astype(np.float32)))
        given = [scores.score(float(value)) for value in values]
        assert abs(float(np.mean(given))) < 0.05
        assert np.std(given) < 1.05
        assert scores.score(math.inf) == pytest.approx(-scores.score(-math.inf))
        assert scores.score(math.inf) < 3


def test_blur_and_brightness_of_pictures() -> None:
    pixels = split_digits(0).stream.pixels[:50]
    sharp, soft, dark = (measure_pixels(each) for each in (pixels, blur(pixels), darken(pixels)))
    assert (soft["blur"] < sharp["blur"]).all()
    assert dark["brightness"] == pytest.approx(0.6 * sharp["brightness"], abs=1.0)


# --- the days -----------------------------------------------------------------------------------------


def observe(classes: int, best: int = 0) -> Observation:
    logits: Floats = np.zeros(classes, np.float32)
    return Observation(np.zeros((16, 16, 3), np.uint8), logits, np.zeros(4, np.float32), best, 0.5, True)


def test_alert_is_logged_once_and_ends(
    scene: Callable[[int], Scene], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, parts = scene(0), split_digits(0)
    caplog.set_level(logging.INFO)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    dark = [made.see(pixels) for pixels in darken(parts.stream.pixels)]
    for seen in dark[:400]:
        watch.add(seen)
    assert "brightness" in watch.alerts
    lines = [record for record in caplog.records if record.message == "pictures have drifted"]
    assert len([line for line in lines if line.__dict__["measure"] == "brightness"]) == 1
    normal = [made.see(pixels) for pixels in parts.stream.pixels]
    for number in range(ALERT_LASTS + 200):
        watch.add(normal[number % len(normal)])
    assert "brightness" not in watch.alerts


def test_one_scene_for_hours_is_no_drift(scene: Callable[[int], Scene], tmp_path: Path) -> None:
    made = scene(0)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    seen = made.see(split_digits(0).stream.pixels[0])
    for _ in range(500):
        watch.add(seen)
    assert not watch.alerts
    [day] = watch.days.values()
    assert day.answered.pictures == 500


def test_still_scenes_of_two_cameras_are_no_drift(scene: Callable[[int], Scene], tmp_path: Path) -> None:
    """Each looks new beside the other one."""
    made = scene(0)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    for _ in range(300):
        for number, pixels in enumerate(split_digits(0).unknown.pixels[:2]):
            watch.add(made.see(pixels)._replace(source=f"camera {number}"))
    assert not watch.alerts


def test_sums_survive_a_restart_and_another_model_begins_anew(scene: Callable[[int], Scene], tmp_path: Path) -> None:
    made, pixels = scene(0), darken(split_digits(0).stream.pixels)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    for each in pixels[:4]:
        watch.add(made.see(each))
    watch.write(watch.encode())
    again = DriftWatch(tmp_path)
    again.use("digits-1", made.reference, made.temperature)
    assert again._charts
    assert 0 < max(again._charts.sums.values()) <= LEVEL
    assert [day.answered.pictures for day in again.days.values()] == [4]
    again.use("digits-2", made.reference, made.temperature)
    assert max(again._charts.sums.values()) == 0


def test_alerts_survive_a_restart_and_end(
    scene: Callable[[int], Scene], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart is no new alert, and does not prolong one."""
    made, pixels = scene(0), darken(split_digits(0).stream.pixels)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    for each in pixels[:100]:
        watch.add(made.see(each))
    assert watch.alerts
    watch.write(watch.encode())
    raised, lines = dict(watch.alerts), len(caplog.records)
    again = DriftWatch(tmp_path)
    again.use("digits-1", made.reference, made.temperature)
    assert again.alerts == raised
    for each in pixels[100:110]:
        again.add(made.see(each))
    assert len(caplog.records) == lines
    normal = made.see(split_digits(0).stream.pixels[0])
    for _ in range(ALERT_LASTS + 1):
        again.add(normal)
    assert not again.alerts
    again.use("digits-2", made.reference, made.temperature)
    assert not again.alerts


def test_process_that_opened_no_model_keeps_the_alerts(scene: Callable[[int], Scene], tmp_path: Path) -> None:
    made, watch = scene(0), DriftWatch(tmp_path)
    watch.use("digits-1", made.reference, made.temperature)
    for pixels in darken(split_digits(0).stream.pixels)[:100]:
        watch.add(made.see(pixels))
    watch.write(watch.encode())
    idle = DriftWatch(tmp_path)
    idle.write(idle.encode())
    again = DriftWatch(tmp_path)
    again.use("digits-1", made.reference, made.temperature)
    assert again.alerts == watch.alerts != {}


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"sums": {"brightness+1": 1e999}}', b'{"days": 1}', b'{"model": "\xef"}']
)
def test_damaged_file_begins_anew(scene: Callable[[int], Scene], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "drift.json").write_bytes(content)
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", scene(0).reference, 1.0)
    watch.add(scene(0).see(split_digits(0).stream.pixels[0]))
    watch.write(watch.encode())
    assert len(DriftWatch(tmp_path).days) == 1


def test_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand classes, and with a clock that jumps by days."""
    watch = DriftWatch(tmp_path)
    watch.use("digits-1", None, 1.0)
    watch.add(observe(1000, best=999))
    [day] = watch.days.values()
    assert day.classes[MOST_CLASSES - 1] == 1
    watch._kept.days.update({f"2001-01-{number:03}": day for number in range(5000)})
    watch.add(observe(1000))
    content = watch.encode()
    assert len(content) <= MAX_DRIFT_BYTES
    assert 0 < len(watch.days) <= MOST_DAYS
