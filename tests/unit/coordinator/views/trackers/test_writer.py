"""What is written of a round and of a configuration."""

from collections.abc import Callable

import pytest

from coordinator.config import RunConfig, make_config
from coordinator.record.record import Record
from coordinator.record.tables import SavedState
from coordinator.views.trackers.writer import LAST_OF_ROUND, flatten_settings, read_rounds
from tests.support.records import RUN

Configured = Callable[..., RunConfig]


def test_figures_have_plain_names(store: Record, configured: Configured, close_round: Callable[[int], None]) -> None:
    close_round(2)
    first, second = read_rounds(store, RUN, configured(), 0, 50)
    assert first.figures == {
        "accuracy/mean": pytest.approx(1.75 / 3), "accuracy/lowest": 0.35, "accuracy/highest": 0.9, "loss/train": 1.5,
        "bytes/down": 11e6, "bytes/up": 3.1e6, "flops/devices": 500, "seconds/devices": 2.5, "seconds/server": 0.5,
        "devices/asked": 3, "devices/accepted": 2,
    }  # fmt: skip
    assert second.figures["epsilon/updates"] == 1.5
    assert list(first.figures)[-1] == LAST_OF_ROUND


def test_rounds_are_read_once_they_are_complete(store: Record, configured: Configured) -> None:
    """Closed, and evaluated where they are to be: a run that was interrupted in between is evaluated later."""
    assert [entry.round for entry in read_rounds(store, RUN, configured(), 0, 50)] == [1]
    assert read_rounds(store, RUN, configured(), 1, 50) == []
    store.rounds.close(RUN, 2, SavedState({}, None, {}), {})
    assert read_rounds(store, RUN, configured(), 1, 50) == []
    every_third = make_config({**store.runs.read(RUN).config, "evaluate_every": 3}, "test").run
    assert [entry.round for entry in read_rounds(store, RUN, every_third, 1, 50)] == [2]
    store.runs.update(RUN, status="cancelled")  # nobody will evaluate it
    assert [entry.round for entry in read_rounds(store, RUN, configured(), 1, 50)] == [2]


def test_settings_are_one_level_of_plain_values(configured: Configured) -> None:
    values = {
        "options": {"lr": 0.5}, "variants": {"jetson-*": {"lr": 0.25}}, "classes": ["ant", "bee"],
        "privacy": {"clip": 2.0}, "trackers": {"writers": ["mlflow"]},
    }  # fmt: skip
    settings = flatten_settings(make_config(values, "test").run)
    assert settings["options.lr"] == 0.5
    assert settings["variants"] == '{"jetson-*": {"lr": 0.25}}'
    assert settings["classes"] == '["ant", "bee"]'
    assert settings["privacy.clip"] == 2.0
    assert settings["images.flip"] is False
    assert not any(key.startswith("trackers") for key in settings)
