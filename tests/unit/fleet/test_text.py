"""Simulations on text, with both engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edge_client.owner.trained import load_own_model
from fedvit.errors import ConfigError, FedvitError
from fedvit.models import TEXT
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import RunOutcome, RunRequest
from fleet.simulate import simulate
from tests.support.codes import has_code
from tests.support.experiments import read_grid
from tests.support.plays import TEXT_MODEL, write_play


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    deal(str(write_play(folder / "play.txt")), "natural", 2, folder / "parts", DealSettings(size=8))
    return folder / "parts"


def run(parts: Path, out: Path, cache: Path, **values: Any) -> RunOutcome:
    engine = values.pop("engine", "onnx")
    options = {"batch_size": 8, "epochs": 4, "optimizer": "adamw", "lr": 0.01, **values.pop("options", {})}
    model = {**TEXT_MODEL, **values.pop("model_options", {})}
    config = {"rounds": 2, "model": TEXT, "model_options": model, "options": options, **values}
    return simulate(
        RunRequest(device_folders(parts, 2), config, out=out, run="run", graph_cache=cache, engine=engine, at_once=1)
    )


def last_accuracy(outcome: RunOutcome) -> float:
    accuracy = outcome.summary.rounds[-1].accuracy_mean
    assert accuracy is not None
    return accuracy


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("fedavg", {}, 0.6),
        # AdamW would make full-sized steps of what rounding leaves of a gradient that is zero
        ("fedtp", {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "hidden": 8, "embedding_dim": 4}, 0.2),
    ],
)
def test_engines_train_the_same_model_of_text(
    parts: Path, tmp_path: Path, graph_cache: Path, method: str, options: dict[str, Any], least: float
) -> None:
    """Words repeat, so that most next characters can be known; both engines learn it, with the same tensors."""
    outcomes = {
        engine: run(parts, tmp_path / engine, graph_cache, method=method, options=options, engine=engine)
        for engine in ("onnx", "torch")
    }
    onnx, torch = (load_file(outcomes[engine].folder / "model.safetensors") for engine in ("onnx", "torch"))
    assert onnx.keys() == torch.keys()
    assert all(np.allclose(onnx[name], torch[name], atol=2e-3) for name in onnx)
    first, second = (last_accuracy(outcomes[engine]) for engine in ("onnx", "torch"))
    assert first == pytest.approx(second, abs=0.02)
    assert first > least


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_other_methods_train_text(parts: Path, tmp_path: Path, graph_cache: Path, method: str) -> None:
    assert last_accuracy(run(parts, tmp_path, graph_cache, method=method)) > 0.6


def test_accuracy_is_that_of_characters(parts: Path, tmp_path: Path, graph_cache: Path) -> None:
    """Of 8 characters in each sample, so that a device's right answers are no whole number of samples."""
    outcome = run(parts, tmp_path, graph_cache, method="local", rounds=1, options={"epochs": 1, "lr": 0.003})
    accuracies = outcome.summary.rounds[-1].accuracy
    tests = {device.device: device.test_samples for device in outcome.summary.devices}
    eighths = [8 * tests[name] * accuracy for name, accuracy in accuracies.items()]
    assert eighths == pytest.approx([round(eighth) for eighth in eighths])
    assert any(round(eighth) % 8 for eighth in eighths)


def test_context_of_the_folder_must_be_the_models(parts: Path, tmp_path: Path, graph_cache: Path) -> None:
    with pytest.raises(FedvitError, check=has_code("FV1402")):
        run(parts, tmp_path, graph_cache, method="fedavg", model_options={"context": 4}, engine="torch")


def test_model_of_text_makes_no_bundle(parts: Path, tmp_path: Path, graph_cache: Path) -> None:
    outcome = run(parts, tmp_path, graph_cache, method="local", rounds=1)
    state = outcome.folder / "state" / "device-0"
    with pytest.raises(ConfigError, check=has_code("FV1110")):
        load_own_model("run", device="device-0", state=state, data=None, threads=1)


EXPERIMENT = """
dataset = "{play}"
{size}
devices = 2
rounds = 1
[model]
name = "transformer_small_text"
[partitions.roles]
partition = "natural"
[methods.fedavg]
method = "fedavg"
"""


def test_experiment_on_text_has_a_context(tmp_path: Path) -> None:
    play, file = write_play(tmp_path / "play.txt"), tmp_path / "text.toml"
    file.write_text(EXPERIMENT.format(play=play, size="context = 8"))
    [cell, *_] = read_grid(file).cells
    assert cell.run["model_options"] == {"context": 8}
    assert cell.deal.image_size == 8
    for size in ("", "context = 8\nimage_size = 8"):
        file.write_text(EXPERIMENT.format(play=play, size=size))
        with pytest.raises(ConfigError, check=has_code("FV2006")):
            read_grid(file)
