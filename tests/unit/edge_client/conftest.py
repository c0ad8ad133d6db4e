"""Tiny programs, really exported, and a device's digits; made once per session."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coordinator.config import make_config
from coordinator.planning.planner import make_plan
from edge_client import agent as agent_module
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fleet.datasets.digits import read_digits
from tests.support.agents import Log, Setting, World

CLASSES = ("0", "1", "2")
MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "fedavg in parts": {"batch_size": 8, "micro_batch": 3, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "eftvit": {"batch_size": 8, "epochs": 3, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
}


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> Mapping[str, Setting]:
    """By name. Graphs are exported once per session, for the tests of the coordinator, too."""
    made = {}
    for name, options in OPTIONS.items():
        method = name.split()[0]
        config = make_config({"method": method, "options": options, "model_options": MODEL}, "test").run
        blobs = BlobStore(tmp_path_factory.mktemp(method))
        made[name] = Setting(make_plan(config, CLASSES, blobs, cache=graph_cache), blobs)
    return made


@pytest.fixture
def fedavg(settings: Mapping[str, Setting]) -> Setting:
    return settings["fedavg"]


@pytest.fixture
def parts(settings: Mapping[str, Setting]) -> Setting:
    """FedAvg, whose batches of 8 are worked off 3 at a time."""
    return settings["fedavg in parts"]


@pytest.fixture
def eftvit(settings: Mapping[str, Setting]) -> Setting:
    return settings["eftvit"]


def write_digits(folder: Path, counts: Mapping[str, int], skip: int = 0) -> None:
    """The first images of each class after `skip`, as PNG in class folders."""
    digits = read_digits(32)
    for name, count in counts.items():
        rows = np.flatnonzero(digits.labels == digits.classes.index(name))[skip : skip + count]
        (folder / name).mkdir(parents=True)
        for number, row in enumerate(rows):
            [pixels] = digits.images[np.array([row])]
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 training images (8, 8, 4: batches of 8, 8 and 4) and 12 test images; not to be changed."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "train", {"0": 8, "1": 8, "2": 4})
    write_digits(folder / "test", dict.fromkeys(CLASSES, 4), skip=50)
    return folder


@pytest.fixture(scope="session")
def uneven_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many images of each class to train on, and 1, 2 and 3 to test: who always gives one answer tells which."""
    folder = tmp_path_factory.mktemp("uneven")
    write_digits(folder / "train", dict.fromkeys(CLASSES, 4))
    write_digits(folder / "test", {"0": 1, "1": 2, "2": 3}, skip=50)
    return folder


@pytest.fixture
def data(digits: Path) -> DeviceData:
    return DeviceData.open(digits)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def world(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(agent_module, "HELLO_AGAIN_S", 600.0)  # what is said again is said for another reason
    world = World(digits, tmp_path)
    yield world
    world.stop()
