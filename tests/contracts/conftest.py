"""The brokers that a contract of transports is held over, one after the other."""

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.other_brokers import usual
from tests.support.worlds import MqttWorld, World, make_world

# brokers of other makers, which `make test-brokers` installs
collect_ignore = [] if usual() else ["test_broker_users.py"]


@pytest.fixture(scope="module", params=usual("memory", "embedded", "mosquitto"))
def any_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    world = make_world(request.param, tmp_path_factory.mktemp("broker"))
    yield world
    world.stop()


@pytest.fixture(scope="module", params=usual("embedded", "mosquitto"))
def any_mqtt_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    world = make_world(request.param, tmp_path_factory.mktemp("broker"))
    yield world
    world.stop()


@pytest.fixture
def world(any_world: Any) -> Iterator[World]:
    """Each kind of broker in turn."""
    any_world.prefix = f"{secrets.token_hex(4)}/"
    yield any_world
    any_world.end_test()


@pytest.fixture
def mqtt_world(any_mqtt_world: Any) -> Iterator[MqttWorld]:
    """Each MQTT broker in turn."""
    any_mqtt_world.prefix = f"{secrets.token_hex(4)}/"
    yield any_mqtt_world
    any_mqtt_world.end_test()
