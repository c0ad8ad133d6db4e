"""Secure sums in simulations: in memory with all messages, and on torch as integers without masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.config import PrivacyConfig
from coordinator.record.privacy import PrivacyStep, compute_epsilon
from coordinator.record.record import open_record
from coordinator.record.tables import SUM
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.tiny import TINY_MODEL

DEVICES = 3
VALUES: dict[str, Any] = {
    "method": "fedper", "rounds": 1, "options": {"batch_size": 16, "lr": 0.05}, "model_options": TINY_MODEL,
    "devices": DEVICES,
}  # fmt: skip


@pytest.mark.slow
def test_both_engines_have_the_sum_of_a_plain_run(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    models, shown = {}, {}
    for name, engine, secure in (("plain", "onnx", False), ("onnx", "onnx", True), ("torch", "torch", True)):
        out = tmp_path / name
        request = RunRequest(
            folders, {**VALUES, "secure": secure}, out=out, run="run", engine=engine, at_once=1, graph_cache=graph_cache
        )
        outcome = simulate(request)
        models[name] = load_file(outcome.folder / "model.safetensors")
        [entry] = outcome.summary.rounds
        shown[name] = entry.cohort, entry.accepted, entry.accuracy_weighted
    with open_record(tmp_path / "onnx") as store:
        [added] = [result for result in store.tasks.read_used_in("run", 1) if result.device == SUM]
        [tested] = [result for result in store.tasks.read_used_in("run", 1, "evaluate") if result.device == SUM]
    bound = added.metrics["error_bound"]
    assert added.metrics["devices"] == DEVICES
    assert sum(count.images for count in tested.by_class) == tested.samples
    assert shown["plain"] == pytest.approx(shown["onnx"])
    for name, value in models["plain"].items():
        assert np.abs(models["onnx"][name] - value).max() <= bound + 2**-22  # float32 near 1
        assert np.allclose(models["torch"][name], models["onnx"][name], atol=1e-4)


def test_simulated_codec_has_the_range_of_the_round_before(folders: list[Path], tmp_path: Path) -> None:
    models = {}
    for name, values in (("plain", {}), ("int8", {"secure": True, "updates": {"up": "int8"}})):
        request = RunRequest(folders, {**VALUES, "rounds": 2, **values}, out=tmp_path / name, run="run", engine="torch")
        models[name] = load_file(simulate(request).folder / "model.safetensors")
    with open_record(tmp_path / "int8") as store:
        first, second = (entry.figures for entry in store.rounds.read_all("run"))
    assert first["sum_error_bound"] < 1e-6
    # 16 bits for four times the mean of the largest numbers; a device has about 32 of 72 images
    step = 4 * first["sum_largest"] / (32767 // DEVICES)
    assert second["sum_error_bound"] == pytest.approx(DEVICES * step * 32 / 72, rel=0.1)
    for name, value in models["plain"].items():
        assert np.abs(models["int8"][name] - value).max() <= second["sum_error_bound"] + 1e-4


def test_noise_in_a_sum_is_that_of_epsilon_and_clip_follows_the_updates(folders: list[Path], tmp_path: Path) -> None:
    """The clip moves down to the updates, and epsilon is that of the noise that was added."""
    private = {"noise_multiplier": 0.01, "clip": 2.0, "clip_quantile": 0.5, "clip_rate": 1.0}
    values = {**VALUES, "rounds": 12, "evaluate_every": 12, "secure": True, "privacy": private}
    simulate(RunRequest(folders, values, out=tmp_path, run="run", engine="torch"))
    with open_record(tmp_path) as store:
        rounds = [entry.figures for entry in store.rounds.read_all("run")]
    config = PrivacyConfig(**private)
    steps = [PrivacyStep(entry["sum_noise_multiplier"], DEVICES, DEVICES) for entry in rounds]
    assert steps[0].noise_multiplier == pytest.approx(0.01)  # no sum of fewer than three devices is possible
    assert rounds[-1]["dp_epsilon"] == pytest.approx(compute_epsilon(steps, config))
    clips = [entry["sum_clip"] for entry in rounds]
    assert clips[0] == 2.0
    assert clips[1] == pytest.approx(2.0 * np.exp(-0.5), rel=0.3)
    within = [entry["sum_within"] for entry in rounds]
    assert within[0] == pytest.approx(1.0, abs=0.3)
    assert min(within) < 0.85  # clip has reached the longest update


def test_a_head_from_a_secure_sum_is_that_of_a_plain_run(
    folders: list[Path], tmp_path: Path, graph_cache: Path
) -> None:
    """The rounding of the sum moves no score by a hundredth of the largest one."""
    heads = {}
    for name, engine, secure in (("plain", "onnx", False), ("onnx", "onnx", True), ("torch", "torch", True)):
        values = {**VALUES, "method": "analytic", "options": {"batch_size": 8}, "secure": secure}
        request = RunRequest(
            folders, values, out=tmp_path / name, run="run", engine=engine, at_once=1, graph_cache=graph_cache
        )
        outcome = simulate(request)
        heads[name] = load_file(outcome.folder / "model.safetensors")["head.weight"]
        [entry] = outcome.summary.rounds
        assert entry.figures["kept_devices"] == (1 if secure else DEVICES)
    largest = np.abs(heads["plain"]).max()
    for name in ("onnx", "torch"):
        assert np.abs(heads[name] - heads["plain"]).max() <= 1e-2 * largest
