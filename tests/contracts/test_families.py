"""Every family of methods learns: ten federated rounds on digits bring more right answers than the first one did."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedvit.models import LSTM, RESNET, SMALL
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
APART = 0.2
"""By which share of their norm generated prompts differ from their mean over the devices, at the least."""
BACKBONE = "backbone"


class Family(NamedTuple):
    """A method, and what its devices train; `on_backbone`: it begins with a backbone that was trained on other images,
    the first digits upside down."""

    what: str
    name: str
    options: dict[str, Any]
    model: str = SMALL
    on_backbone: bool = False

    def __repr__(self) -> str:
        return self.what


FAMILIES = [
    Family("the whole model is averaged", "fedavg", {}),
    Family("the whole model is averaged, of masked images", "fedavg", {"mask": 0.5}),
    Family("a part stays on the device", "fedper", {}),
    Family("prefixes stay on the device", "fedperfix", {}),
    Family("adapters of a frozen backbone are averaged", "fed_lora", {}),
    Family("masked images, features for the server", "eftvit", {"local_blocks": 1, "mask": 0.5, "warmup_rounds": 0}),
    Family("the server generates a part for each device", "fedtp", {}),
    Family("some blocks at a time", "fedbfpt", {"local_blocks": 2}),
    Family("a model that is good after one step", "per_fedavg", {"batch_size": 4}),
    Family("prompts are averaged", "fed_prompt", {"head": "local"}, on_backbone=True),
    Family("the server generates prompts for each device", "pfedpg", {}, on_backbone=True),
    Family("a residual network is averaged", "fedavg", {}, model=RESNET),
    Family("a residual network whose norms stay on the device", "fedbn", {}, model=RESNET),
    Family("two residual networks are mixed", "apfl", {}, model=RESNET),
    Family("an LSTM is averaged", "fedavg", {}, model=LSTM),
    Family("an LSTM whose head stays on the device", "fedper", {}, model=LSTM),
    Family("an LSTM of each device", "local", {}, model=LSTM),
]
SIZES = {SMALL: MODEL, RESNET: CONVOLUTIONS, LSTM: LSTM_MODEL}


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


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Each device has the speeches of a role, which repeats a word of its own."""
    out = tmp_path_factory.mktemp("play")
    deal(str(write_play(out / "play.txt", DEVICES)), "natural", DEVICES, out / "parts", DealSettings(size=8))
    return device_folders(out / "parts", DEVICES)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_ten_rounds_improve_accuracy(family: Family, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All devices of a cohort are computed side by side on torch. Generated prompts differ between devices, too."""
    values: dict[str, Any] = {"method": family.name, "options": {**QUICK, **family.options}, "model": family.model}
    values |= {"model_options": SIZES[family.model], "rounds": ROUNDS, "seed": 0, "accelerator": "cpu"}
    out = tmp_path
    if family.on_backbone:
        out, values["start_from"] = request.getfixturevalue("runs"), BACKBONE
    devices = request.getfixturevalue("speeches" if family.model == LSTM else "folders")
    outcome = simulate(RunRequest(devices, values, out=out, run=family.name, engine="torch", at_once=1))
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN
    if family.name == "pfedpg":
        files = sorted((out / family.name / "generated").iterdir())
        prompts = np.stack([load_file(file)["prompts.tokens"] for file in files])
        apart = np.linalg.norm(prompts - prompts.mean(axis=0), axis=(1, 2))
        assert np.mean(apart / np.linalg.norm(prompts, axis=(1, 2))) >= APART
