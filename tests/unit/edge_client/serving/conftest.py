from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from edge_client.serving.models import ModelServer
from edge_client.storage.models import DeviceModels
from tests.support.served import Scene, add_model, make_scene, write_digits


@pytest.fixture(scope="session")
def digit_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles that are not to be changed; the poisoned one learnt shuffled labels."""
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "good": write_digits(folder / "good", 0),
        "other": write_digits(folder / "other", 1),
        "poisoned": write_digits(folder / "poisoned", 0, shuffled=True),
    }


@pytest.fixture
def state(tmp_path: Path, digit_bundles: dict[str, Path]) -> Path:
    """A device whose champion is digits-1."""
    state = tmp_path / "state"
    DeviceModels(state).promote(add_model(state, digit_bundles["good"], 1))
    return state


@pytest.fixture
def server(state: Path) -> Iterator[ModelServer]:
    server = ModelServer(state, 1)
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Scene]:
    """Make the model of a seed, once."""
    return cache(lambda seed: make_scene(tmp_path_factory.mktemp("scene") / "bundle", seed))
