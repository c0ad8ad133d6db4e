"""What may differ when a run is resumed."""

from typing import Any

import msgspec
import pytest

from coordinator.config import TrackersConfig, make_config, resume_config
from fedvit.errors import ConfigError
from tests.support.codes import has_code

BEGAN: dict[str, Any] = {
    "method": "fedavg", "rounds": 10, "devices": 3, "options": {"lr": 0.1, "batch_size": 8}, "classes": ["ant", "bee"],
    "images": {"flip": True, "crop_padding": 4}, "variants": {"pi-*": {"epochs": 2}},
}  # fmt: skip


def recorded() -> dict[str, Any]:
    return dict(msgspec.json.decode(msgspec.json.encode(make_config(BEGAN, "test").run)))


def resumed(given: dict[str, Any]) -> Any:
    return resume_config("r", recorded(), given, "flags")


@pytest.mark.parametrize("given", [{}, BEGAN, {"images": {"flip": True}}, {"options": {"lr": 0.1}}, {"seed": 0}])
def test_resumed_config_takes_what_is_equal(given: dict[str, Any]) -> None:
    assert resumed(given) == make_config(BEGAN, "test").run


def test_resumed_config_takes_more_rounds_fewer_devices_and_other_stop_rules() -> None:
    assert resumed({"rounds": 50, "devices": 2}) == make_config({**BEGAN, "rounds": 50, "devices": 2}, "test").run
    config = resume_config("r", {**recorded(), "stop": {"patience": 2, "accuracy": 0.9}}, {"stop": {"patience": 5}}, "")
    assert (config.stop.patience, config.stop.accuracy) == (5, 0.9)


@pytest.mark.parametrize(
    ("given", "named"), [({"rounds": 0}, "start_from"), ({"stop": {"epsilon": 8}}, "noise_multiplier")]
)
def test_config_names_what_a_stop_rule_or_a_run_without_rounds_lacks(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_config(given, "test")


def test_resumed_config_takes_metrics_elsewhere() -> None:
    """What is not given stays as it began."""
    began = {**recorded(), "trackers": {"writers": ["mlflow"], "mlflow_uri": "http://old", "mlflow_experiment": "ants"}}
    config = resume_config("r", began, {"trackers": {"mlflow_uri": "http://new"}}, "flags")
    assert config.trackers == TrackersConfig(writers=("mlflow",), mlflow_uri="http://new", mlflow_experiment="ants")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rounds": 9}, "rounds = 10, and now rounds = 9 "),
        ({"devices": 4}, "devices = 3, and now devices = 4 "),
        ({"images": {"crop_padding": 2}}, "images.crop_padding = 4, and now images.crop_padding = 2 "),
        ({"variants": {"pi-*": {"epochs": 3}}}, "variants.pi-*.epochs = 2, and now variants.pi-*.epochs = 3 "),
        ({"classes": ["bee", "ant"]}, "classes = ['ant', 'bee'], and now classes = ['bee', 'ant'] "),
    ],
)
def test_resumed_config_refuses_any_other_change(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1616")) as error:
        resumed(given)
    assert named in str(error.value)
