"""The table [broker]: an address may bring its port."""

from typing import Any

import pytest

from coordinator.config import make_config
from fedvit.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "listen", "port"),
    [
        ({"listen": "127.0.0.1:18831"}, "127.0.0.1", 18831),
        ({"listen": "[::1]:18831"}, "::1", 18831),
        ({"listen": "::1"}, "::1", 1883),
        ({"listen": "0.0.0.0", "port": 7}, "0.0.0.0", 7),
        ({"listen": "localhost:7", "port": 7}, "localhost", 7),
    ],
)
def test_listen_may_say_the_port(given: dict[str, Any], listen: str, port: int) -> None:
    config = make_config({"broker": given}, "test").broker
    assert (config.listen, config.port) == (listen, port)


def test_listen_and_port_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"listen = '127.0.0.1:18831' says port 18831, and port = 1883"):
        make_config({"broker": {"listen": "127.0.0.1:18831", "port": 1883}}, "test")
