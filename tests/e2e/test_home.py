"""A real device on the home's own broker, beside the broker of its fleet."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.security.broker.process import Broker
from edge_client.cli import cli
from fedvit.errors import ConfigError, LinkDown
from tests.support.brokers import mosquitto
from tests.support.codes import has_code
from tests.support.home_assistant import HomeAssistant
from tests.support.programs import CONFIG, Stage, wait_for

RUN = {
    "method": "fedavg",
    "rounds": 2,
    "seed": 5,
    "devices": 1,
    "options": {"epochs": 1, "batch_size": 8, "lr": 0.01},
    "model_options": CONFIG["model_options"],
    "deadline_s": 120.0,
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """The home's own, with a password."""
    with mosquitto(tmp_path / "home", "retain_available true", password="s3cret") as broker:
        yield broker


def home_address(broker: Broker, password: str = ":s3cret") -> str:
    return f"mqtt://{broker.address.user}{password}@{broker.address}"


@pytest.mark.slow
def test_home_shows_a_run(stage: Stage, broker: Broker) -> None:
    coordinator = stage.coordinator(broker="mosquitto", values=RUN)
    password = stage.folder / "password"
    password.write_text("s3cret\n")
    with closing(HomeAssistant(broker.address)) as house:
        device = stage.device("device-0", "--home", home_address(broker, ""), "--home-password-file", str(password))
        wait_for(lambda: house.entities and house.state("online") == "on", "the device")
        assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
        assert stage.finish(device, "device-0") == 0, stage.log("device-0")
        wait_for(lambda: house.state("online") == "off", "its farewell")
        seen = house.list_states("accuracy")
        accuracy = stage.show()["rounds"][-1]["accuracy"]["device-0"]
    assert house.list_states("round")[-1] == "2"
    assert f"{100 * accuracy:.1f}" in seen, (accuracy, seen)
    assert not house.faults
    assert "s3cret" not in stage.log("device-0")


def test_killed_device_goes_offline_and_is_removed(
    stage: Stage, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stage.environment, "FEDVIT_HOME_BROKER", home_address(broker))
    with closing(HomeAssistant(broker.address)) as house:
        device = stage.device("device-0")
        wait_for(lambda: house.entities and house.state("activity") == "no connection to the broker", "the device")
        device.kill()
        wait_for(lambda: house.state("online") == "off", "the broker's word of its end")
        assert "warning" not in stage.log("device-0")

        command = ["--id", "device-0", "--home", home_address(broker), "home"]
        shown = call(command)
        assert "the password of --home" in shown.stderr
        for name in house.entities:
            assert f"/{name}/config" in shown.stdout
        monkeypatch.setenv("FEDVIT_HOME_BROKER", home_address(broker))
        removed = call(["--id", "device-0", "home", "--remove"])
        assert not removed.stderr
        wait_for(lambda: not house.entities, "the end of its entities")


def test_mistakes(stage: Stage, broker: Broker) -> None:
    missing = str(stage.folder / "no file")
    mistakes = (
        (["home"], ConfigError, "FV1471", "--home is missing"),
        (["--home", "http://x", "home"], ConfigError, "FV1206", "--home"),
        (["--home", "x", "--home-password-file", missing, "home"], ConfigError, "FV1471", missing),
        (["--home", home_address(broker, ""), "--id", "a", "home"], LinkDown, "FV1471", "refused"),
        (["--home", home_address(broker), "--state", missing, "home"], ConfigError, "FV1412", missing),
    )
    for words, kind, code, text in mistakes:
        with pytest.raises(kind, check=has_code(code, text)):
            call(words)


def call(words: list[str]) -> Result:
    return CliRunner().invoke(cli, words, catch_exceptions=False)
