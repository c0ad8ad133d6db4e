"""Simulations with models that are no Transformers: both engines train the same tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedvit.models import LSTM, RESNET
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.displays import Lines
from tests.support.plays import LSTM_MODEL, write_play

SMALL = {"image_size": 8, "width": 8, "stages": 2, "groups": 2}


@pytest.mark.parametrize(
    ("model", "options", "method"),
    [
        (LSTM, LSTM_MODEL, "fedper"),
        pytest.param(RESNET, SMALL, "fedavg", marks=pytest.mark.slow),
        pytest.param(RESNET, {**SMALL, "block": "bottleneck"}, "fedbn", marks=pytest.mark.slow),
    ],
)
def test_engines_train_the_same_model(
    model: str, options: dict[str, Any], method: str, tmp_path: Path, graph_cache: Path
) -> None:
    """On torch all devices of the cohort in one batch."""
    source = "digits" if model == RESNET else str(write_play(tmp_path / "play.txt"))
    deal(source, "iid" if model == RESNET else "natural", 2, tmp_path / "parts", DealSettings(size=8))
    values = {
        "method": method, "options": {"batch_size": 32, "lr": 0.05}, "rounds": 2, "model": model,
        "model_options": options, "accelerator": "cpu",
    }  # fmt: skip
    made, lines = {}, Lines()
    for engine in ("onnx", "torch"):
        outcome = simulate(
            RunRequest(
                device_folders(tmp_path / "parts", 2),
                values,
                out=tmp_path / engine,
                run="run",
                graph_cache=graph_cache,
                engine=engine,
                at_once=1,
            ),
            lines,
        )
        made[engine] = load_file(outcome.folder / "model.safetensors")
    assert not [line for line in lines.lines if "one after the other" in line]
    assert made["onnx"].keys() == made["torch"].keys()
    for name, value in made["onnx"].items():
        assert np.linalg.norm(value - made["torch"][name]) <= 1e-3 * np.linalg.norm(value), name
