"""Models of text, and those that are no Transformers, are trained by edge processes over a real broker."""

from pathlib import Path
from typing import Any

import pytest

from fedvit.models import LSTM, RESNET, TEXT
from fleet.partition import DealSettings, deal
from tests.support.plays import LSTM_MODEL, TEXT_MODEL, write_play
from tests.support.programs import Stage

FEDTP = {"batch_size": 8, "optimizer": "adamw", "lr": 0.01, "hidden": 8, "embedding_dim": 4}
RUNS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], int]] = {
    TEXT: ("fedtp", FEDTP, "natural", TEXT_MODEL, 2),
    LSTM: ("fedper", {"batch_size": 4, "epochs": 4, "optimizer": "adamw", "lr": 0.02}, "natural", LSTM_MODEL, 3),
    RESNET: (
        "fedavg", {"batch_size": 32, "optimizer": "adamw", "lr": 0.005}, "iid",
        {"image_size": 8, "width": 8, "stages": 2, "groups": 2}, 3,
    ),
}  # fmt: skip
"""By model: method, its options, partition, the model's options, rounds."""


@pytest.mark.slow
@pytest.mark.parametrize("model", RUNS)
def test_processes_train(model: str, tmp_path: Path, cache: Path) -> None:
    """No device has software for a model: what it runs are graphs of plain operators."""
    method, options, partition, model_options, rounds = RUNS[model]
    parts = tmp_path / "parts"
    source = "digits" if model == RESNET else str(write_play(tmp_path / "play.txt"))
    deal(source, partition, 2, parts, DealSettings(size=8))
    stage = Stage(tmp_path, parts, cache)
    values = {
        "method": method, "model": model, "model_options": model_options, "devices": 2, "rounds": rounds,
        "deadline_s": 120.0, "options": options,
    }  # fmt: skip
    try:
        coordinator = stage.coordinator(broker="mosquitto", values=values)
        devices = {name: stage.device(name) for name in ("device-0", "device-1")}
        stage.finish_run(coordinator, devices)
        shown = stage.show()
    finally:
        stage.close()
    assert [entry["accepted"] for entry in shown["rounds"]] == [2] * rounds
    assert not shown["refusals"]
    assert min(shown["rounds"][-1]["accuracy"].values()) > 0.3, "by chance less than a fifth would be right"
