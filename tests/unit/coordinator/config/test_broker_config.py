"""The table [broker]: an address may bring its port."""

from typing import Any, get_args

import msgspec
import pytest

from coordinator.config import BrokerConfig, make_config
from fedvit.errors import ConfigError
from fedvit.wire.limits import PROFILES, BrokerLimits
from tests.support.codes import has_code


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
    with pytest.raises(ConfigError, check=has_code("FV1010")):
        make_config({"broker": {"listen": "127.0.0.1:18831", "port": 1883}}, "test")


def test_limits_are_those_of_a_named_profile_unless_they_are_given() -> None:
    given = {"limits": "aws-iot-core", "max_payload_bytes": 100_000, "publishes_per_s": 0}
    limits = make_config({"broker": given}, "test").broker.broker_limits()
    assert limits == BrokerLimits(100_000, publishes_per_s=0, topics_per_subscribe=8, max_inflight=100)
    assert make_config({}, "test").broker.broker_limits() == BrokerLimits()
    field = next(field for field in msgspec.structs.fields(BrokerConfig) if field.name == "limits")
    assert set(get_args(get_args(field.type)[0])) == {"none", *PROFILES}
