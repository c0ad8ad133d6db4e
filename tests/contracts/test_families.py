"""Every family of methods learns: ten federated rounds on digits bring more right answers than the first one did."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet.datasets.digits import read_digits
from fleet.devices import device_folders
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.simulate import simulate

DEVICES, ROUNDS = 3, 10
IMAGES = 320
"""Three of ten of them are for tests: about 100 answers in all."""
MARGIN = 0.2
"""By which the mean accuracy over the devices rises between the first and the last round, at the least: of three seeds
the worst rose by 0.22."""
MODEL = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
QUICK: dict[str, Any] = {"batch_size": 32, "epochs": 2, "optimizer": "adamw", "lr": 0.01}
"""Much for ten rounds: the smallest model begins with guesses, one in ten of which is right."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "the whole model is averaged": ("fedavg", {}),
    "a part stays on the device": ("fedper", {}),
    "prefixes stay on the device": ("fedperfix", {}),
    "adapters of a frozen backbone are averaged": ("fed_lora", {}),
    "masked images, features for the server": ("eftvit", {"local_blocks": 1, "mask": 0.5, "warmup_rounds": 0}),
    "the server generates a part for each device": ("fedtp", {}),
    "some blocks at a time": ("fedbfpt", {"local_blocks": 2}),
}


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


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_rounds_improve_accuracy(family: str, folders: list[Path], tmp_path: Path) -> None:
    """All devices of a cohort are computed side by side on torch."""
    method, options = FAMILIES[family]
    values = {"method": method, "options": {**QUICK, **options}, "model_options": MODEL, "rounds": ROUNDS}
    outcome = simulate(
        folders, {**values, "seed": 0, "accelerator": "cpu"}, out=tmp_path, run="run", engine="torch", at_once=1
    )
    first, *_, last = [np.mean(list(entry.accuracy.values())) for entry in outcome.summary.rounds]
    assert last - first >= MARGIN
