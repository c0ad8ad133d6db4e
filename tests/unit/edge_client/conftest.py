"""Tiny programs, really exported, and a device's digits; made once per session."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from edge_client.link import resending
from edge_client.sandbox.launcher import Launcher
from fedvit.data.folder import DeviceData
from tests.support.agents import Log, World
from tests.support.once import make_once
from tests.support.settings import Setting, make_settings, read_settings


@pytest.fixture(scope="session")
def made(shared: Path, graph_cache: Path) -> Path:
    """Programs and digits as files, not to be changed. FEDVIT_TEST_SETTINGS names those that were made elsewhere, for
    tests on a processor for which there is no torch."""
    if elsewhere := os.environ.get("FEDVIT_TEST_SETTINGS"):
        return Path(elsewhere)
    return make_once(shared / "settings", lambda folder: make_settings(folder, graph_cache))


@pytest.fixture(scope="session")
def settings(made: Path) -> Mapping[str, Setting]:
    return read_settings(made)


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


@pytest.fixture(scope="session")
def digits(made: Path) -> Path:
    """20 training images (8, 8, 4: batches of 8, 8 and 4) and 12 test images; not to be changed."""
    return made / "digits"


@pytest.fixture(scope="session")
def uneven_digits(made: Path) -> Path:
    """As many images of each class to train on, and 1, 2 and 3 to test: who always gives one answer tells which."""
    return made / "uneven"


@pytest.fixture
def data(digits: Path) -> DeviceData:
    return DeviceData.open(digits)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def worlds(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], World]]:
    """Make federations of one device."""
    monkeypatch.setattr(resending, "AGAIN_S", 600.0)  # what is said again is said for another reason
    made: list[World] = []

    def make() -> World:
        made.append(World(digits, tmp_path / f"world-{len(made)}" if made else tmp_path))
        return made[-1]

    yield make
    for world in made:
        world.stop()


@pytest.fixture
def world(worlds: Callable[[], World]) -> World:
    return worlds()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()
