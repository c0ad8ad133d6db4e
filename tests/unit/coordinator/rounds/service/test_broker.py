"""Where devices meet their coordinator, and what its operator is told of that."""

from pathlib import Path

import pytest

from coordinator.config import BrokerConfig
from coordinator.rounds.service.broker import broker_endpoint
from coordinator.security.broker.process import claim_port


@pytest.mark.parametrize(
    ("settings", "federation", "device"),
    [
        ({}, "home", "edge-client --broker localhost:{port} --data FOLDER"),
        ({"password": "secret"}, "barn", "edge-client --broker mqtt://fedvit:PASSWORD@localhost:{port} --data FOLDER "
                                         "--federation barn"),
    ],
)  # fmt: skip
def test_operator_sees_the_command_for_devices(
    tmp_path: Path, settings: dict[str, str], federation: str, device: str
) -> None:
    port, said = claim_port(), list[str]()
    config = BrokerConfig(broker="mosquitto", port=port, **settings)
    with broker_endpoint(config, federation, tmp_path, said.append):
        pass
    assert said[0].endswith(f" at 127.0.0.1:{port}")
    assert said[-1] == f"on each device: {device.format(port=port)}"
    assert "secret" not in " ".join(said)


def test_address_of_ipv6_can_be_copied(tmp_path: Path) -> None:
    said = list[str]()
    with broker_endpoint(BrokerConfig(broker="mqtt://[::1]:1884"), "home", tmp_path, said.append):
        pass
    assert said[-1] == "on each device: edge-client --broker [::1]:1884 --data FOLDER"


def test_broker_that_listens_everywhere_is_named_by_what_it_listens_on(tmp_path: Path) -> None:
    said = list[str]()
    port = claim_port()
    config = BrokerConfig(broker="mosquitto", listen="0.0.0.0", port=port, password="secret")
    with broker_endpoint(config, "home", tmp_path, said.append):
        pass
    assert said[0].endswith(f" at 0.0.0.0:{port}")
    assert "@127.0.0.1" not in said[-1]
    assert "@localhost" not in said[-1]
