"""The bench of the server's training: a real process, and both sides on a few features."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.commands import bench_command
from bench.server import ServerSettings, run_server_bench, train, write_features
from fedvit.errors import ConfigError
from fedvit.program import Collect
from tests.support.codes import has_code

MODEL = "vit_small_images"
FEW = ServerSettings(devices=3, images=8, batch_size=4)


def test_a_process_is_measured() -> None:
    """Four devices with 24 images each: 96 are 12 batches of 8, of which 3 are not timed and 5 are asked for."""
    flags = ["--model", MODEL, "--devices", "4", "--images", "24", "--batch", "8", "--steps", "5", "--files-only"]
    flags += ["--accelerator", "cpu", "--precision", "bf16"]
    outcome = CliRunner().invoke(bench_command, ["server", *flags, "--json"], catch_exceptions=False)
    assert outcome.exit_code == 0
    [result] = json.loads(outcome.stdout)["results"]
    assert (result["features_bytes"], result["steps"]) == (96 * 17 * 64 * 4, 5)
    assert result["peak_rss_bytes"] == result["peak_above_model_bytes"] + result["loaded_bytes"]
    assert result["model_bytes"] < result["loaded_bytes"]
    assert result["in_memory_images_per_s"] is None


def test_both_sides_train_on_the_same_features(tmp_path: Path) -> None:
    """24 images are 6 batches of 4, of which 3 are timed."""
    write_features(tmp_path, Collect("features.2", (17, 64), 1.0), FEW)
    files, memory = (train(MODEL, side, tmp_path, FEW) for side in ("files", "memory"))
    assert (files.steps, files.model_bytes) == (memory.steps, memory.model_bytes)
    assert files.steps == 3


def test_several_processes_are_not_measured() -> None:
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        CliRunner().invoke(bench_command, ["server", "--accelerator", "cpu:2"], catch_exceptions=False)


def test_features_that_do_not_fit_on_the_disk() -> None:
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        run_server_bench([MODEL], ServerSettings(devices=10**6, images=10**6))
