from pathlib import Path

import pytest

from edge_client.owner.page import guesses as guesses_module
from edge_client.owner.page.guesses import LEAST_FREE_BYTES, TRIES, Guesses, NoGuess
from edge_client.storage.state import device_id
from fedvit.errors import ConfigError, DataError
from tests.support.agents import World
from tests.support.codes import has_code
from tests.support.owner_pages import Home, make_home, make_settings
from tests.support.settings import Setting


def test_guess_is_of_the_newest_model_which_is_loaded_once(
    world: World, fedavg: Setting, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg))
    device_id(world.state, "pi", digits)
    guesses = Guesses(make_settings(Home(digits, world.state)), world.state)
    image = next((digits / "test").glob("*/*.png"))
    first = guesses.guess(image)
    assert first.label in ("0", "1", "2")
    loaded = guesses._model
    assert loaded is not None
    world.server.acknowledge(world.result(fedavg, round=2))
    assert guesses.guess(image) == first
    assert guesses._model is loaded, "it is of seconds ago"
    guesses.drop_idle()
    assert guesses._model is loaded, "it was used just now"
    monkeypatch.setattr(guesses_module, "FRESH_S", 0.0)
    guesses.guess(image)
    assert guesses._model is not loaded
    monkeypatch.setattr(guesses_module, "IDLE_S", -1.0)
    guesses.drop_idle()
    assert guesses._model is None


def test_model_that_a_task_replaces_meanwhile_is_read_again(
    world: World, fedavg: Setting, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg))
    device_id(world.state, "pi", digits)
    guesses = Guesses(make_settings(Home(digits, world.state)), world.state)
    monkeypatch.setattr(guesses_module, "AGAIN_S", 0.0)
    make, failures = guesses._make, [ConfigError("FV1424", "another task")] * (TRIES - 1)

    def fail_first() -> object:
        if failures:
            raise failures.pop()
        return make()

    monkeypatch.setattr(guesses, "_make", fail_first)
    image = next((digits / "test").glob("*/*.png"))
    assert guesses.guess(image).label in ("0", "1", "2")
    failures += [ConfigError("FV1424", "another task")] * TRIES
    monkeypatch.setattr(guesses_module, "FRESH_S", 0.0)
    with pytest.raises(NoGuess, check=has_code("FV1424", "another task")):
        guesses.guess(image)


def test_little_memory_is_left_to_the_device(world: World, fedavg: Setting, digits: Path) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg))
    guesses = Guesses(make_settings(Home(digits, world.state)), world.state, lambda: LEAST_FREE_BYTES - 1)
    with pytest.raises(NoGuess, check=has_code("FV1424", "memory")):
        guesses.guess(next((digits / "test").glob("*/*.png")))


def test_device_without_a_model(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    with pytest.raises(NoGuess, check=has_code("FV1424", "no model yet")):
        Guesses(make_settings(home), home.state).guess(home.images / "cat" / "known.png")


def test_damaged_picture(world: World, fedavg: Setting, digits: Path, tmp_path: Path) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg))
    device_id(world.state, "pi", digits)
    damaged = tmp_path / "a.png"
    damaged.write_text("no picture")
    with pytest.raises(DataError):
        Guesses(make_settings(Home(digits, world.state)), world.state).guess(damaged)
