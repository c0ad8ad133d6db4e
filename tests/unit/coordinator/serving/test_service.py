"""The rule of a service that starts a run on drift."""

from pathlib import Path

import pytest

from coordinator.config import ServiceConfig
from coordinator.serving.service import read_drift_rule
from fedvit.errors import ConfigError
from tests.support.codes import has_code


def write(folder: Path, text: str) -> ServiceConfig:
    file = folder / "again.toml"
    file.write_text(text)
    return ServiceConfig(drift_run=str(file), drift_devices=2, drift_every_h=6.0)


def test_run_is_read_once_and_uses_the_federation_of_the_service(tmp_path: Path) -> None:
    rule = read_drift_rule(write(tmp_path, 'method = "fedavg"\nrounds = 3\n'))
    assert rule is not None
    assert (rule.devices, rule.every_h) == (2, 6.0)
    assert (rule.config["method"], rule.config["rounds"]) == ("fedavg", 3)
    assert "federation" not in rule.config
    rule = read_drift_rule(write(tmp_path, 'method = "fedavg"\nfederation = "garden"\n'))
    assert rule is not None
    assert rule.config["federation"] == "garden"
    assert read_drift_rule(ServiceConfig()) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [('[broker]\nbroker = "embedded"\n', "FV1023"), ('method = "none"\n', "FV1101"), ("rounds = -1\n", "FV1004")],
)
def test_run_that_could_never_begin_is_refused_at_the_start(tmp_path: Path, text: str, code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code)):
        read_drift_rule(write(tmp_path, text))
