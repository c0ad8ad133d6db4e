"""Every family of methods learns: ten federated rounds on digits bring more right answers than the first one did."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedvit.models import LSTM, RESNET
from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal, write_device_folders
from fleet.partitions import partition
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.plays import LSTM_MODEL, write_play

DEVICES, ROUNDS = 3, 10
IMAGES = 320
"""Three of ten of them are for tests: about 100 answers in all."""
MARGIN = 0.2
"""By which the mean accuracy over the devices rises between the first and the last round, at the least: of three seeds
the worst rose by 0.22."""
CONVOLUTIONS = {"image_size": 8, "width": 8, "stages": 2, "groups": 2}
MODEL = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
QUICK: dict[str, Any] = {"batch_size": 32, "epochs": 2, "optimizer": "adamw", "lr": 0.01}
"""Much for ten rounds: the smallest model begins with guesses, one in ten of which is right."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "the whole model is averaged": ("fedavg", {}),
    "the whole model is averaged, of masked images": ("fedavg", {"mask": 0.5}),
    "a part stays on the device": ("fedper", {}),
    "prefixes stay on the device": ("fedperfix", {}),
    "adapters of a frozen backbone are averaged": ("fed_lora", {}),
    "masked images, features for the server": ("eftvit", {"local_blocks": 1, "mask": 0.5, "warmup_rounds": 0}),
    "the server generates a part for each device": ("fedtp", {}),
    "some blocks at a time": ("fedbfpt", {"local_blocks": 2}),
    "a model that is good after one step": ("per_fedavg", {"batch_size": 4}),
}
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts are averaged": ("fed_prompt", {"head": "local"}),
    "the server generates prompts for each device": ("pfedpg", {}),
}
"""They begin with a backbone that was trained on other images, the first digits upside down."""
BACKBONE = "backbone"
APART = 0.2
"""By which share of their norm generated prompts differ from their mean over the devices, at the least."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Devices of different size, with different shares of the classes."""
    digits = read_digits(8)
    few = np.arange(IMAGES)
    samples = replace(digits, images=digits.images[few], labels=digits.labels[few])
    shares = partition("dirichlet", samples.labels, DEVICES, seed=3, alpha=1.0)
    out = tmp_path_factory.mktemp("dealt") / "parts"
    write_device_folders(samples, shares, out, test_share=0.3, seed=3)
    return device_folders(out, DEVICES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, with a backbone trained on one device."""
    digits, out = read_digits(8), tmp_path_factory.mktemp("runs")
    others = np.arange(IMAGES, 3 * IMAGES)
    samples = replace(digits, images=digits.images[others][:, ::-1], labels=digits.labels[others])
    write_device_folders(samples, [np.arange(len(others))], out / "parts", test_share=0.1, seed=0)
    values = {"method": "fedavg", "options": {**QUICK, "epochs": 20}, "model_options": MODEL, "rounds": 1}
    simulate(
        RunRequest(
            device_folders(out / "parts", 1),
            {**values, "accelerator": "cpu"},
            out=out,
            run=BACKBONE,
            engine="torch",
            at_once=1,
        )
    )
    return out


@pytest.mark.parametrize("family", PROMPTS)
def test_ten_rounds_of_prompts_on_a_trained_backbone_improve_accuracy(
    family: str, folders: list[Path], runs: Path
) -> None:
    """What the server generates differs between devices, too."""
    method, options = PROMPTS[family]
    values = {"method": method, "options": {**QUICK, **options}, "model_options": MODEL, "rounds": ROUNDS}
    outcome = simulate(
        RunRequest(
            folders,
            {**values, "seed": 0, "accelerator": "cpu", "start_from": BACKBONE},
            out=runs,
            run=method,
            engine="torch",
            at_once=1,
        )
    )
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN
    if method == "pfedpg":
        files = sorted((runs / method / "generated").iterdir())
        prompts = np.stack([load_file(file)["prompts.tokens"] for file in files])
        apart = np.linalg.norm(prompts - prompts.mean(axis=0), axis=(1, 2))
        assert np.mean(apart / np.linalg.norm(prompts, axis=(1, 2))) >= APART


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "apfl"])
def test_ten_rounds_of_a_residual_network_improve_accuracy(method: str, folders: list[Path], tmp_path: Path) -> None:
    values = {"method": method, "options": QUICK, "model": RESNET, "model_options": CONVOLUTIONS, "rounds": ROUNDS}
    outcome = simulate(
        RunRequest(
            folders, {**values, "seed": 0, "accelerator": "cpu"}, out=tmp_path, run="run", engine="torch", at_once=1
        )
    )
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN


@pytest.mark.parametrize("method", ["fedavg", "fedper", "local"])
def test_ten_rounds_of_an_lstm_improve_accuracy(method: str, tmp_path: Path) -> None:
    """Each device has the speeches of a role, which repeats a word of its own."""
    deal(str(write_play(tmp_path / "play.txt", DEVICES)), "natural", DEVICES, tmp_path / "parts", DealSettings(size=8))
    values = {"method": method, "options": QUICK, "model": LSTM, "model_options": LSTM_MODEL, "rounds": ROUNDS}
    outcome = simulate(
        RunRequest(
            device_folders(tmp_path / "parts", DEVICES),
            {**values, "seed": 0, "accelerator": "cpu"},
            out=tmp_path / "runs",
            run="run",
            engine="torch",
            at_once=1,
        )
    )
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_rounds_improve_accuracy(family: str, folders: list[Path], tmp_path: Path) -> None:
    """All devices of a cohort are computed side by side on torch."""
    method, options = FAMILIES[family]
    values = {"method": method, "options": {**QUICK, **options}, "model_options": MODEL, "rounds": ROUNDS}
    outcome = simulate(
        RunRequest(
            folders, {**values, "seed": 0, "accelerator": "cpu"}, out=tmp_path, run="run", engine="torch", at_once=1
        )
    )
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN
