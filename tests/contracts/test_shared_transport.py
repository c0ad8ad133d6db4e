"""Links that share one thread promise what every transport promises: the same suite, over mosquitto."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from coordinator.security.broker import Broker, start_broker
from fedvit.transport.base import Connected, Disconnected, Transport
from fedvit.transport.mqtt import MqttTransport
from fedvit.transport.mqtt_loop import MqttLoop
from tests.contracts.test_transport import (  # noqa: F401 - the contract, held here once more
    test_a_client_id_that_comes_back_ends_its_old_link_first,
    test_closing_is_a_farewell_without_a_will,
    test_filters_with_wildcards_hear_what_they_cover,
    test_the_will_of_a_client_that_vanishes_is_published,
    test_the_will_of_each_connection_has_its_number,
)
from tests.support.worlds import Client, MqttWorld

LINKS = 30


class SharedWorld(MqttWorld):
    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.loop = MqttLoop()

    def transport(self, client_id: str) -> Transport:
        return MqttTransport(SimpleQueue(), self.address(), client_id, loop=self.loop)

    def stop(self) -> None:
        self.loop.close()
        super().stop()


@pytest.fixture(scope="module")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedWorld]:
    world = SharedWorld(start_broker("mosquitto", tmp_path_factory.mktemp("broker"), port=0))
    yield world
    world.stop()


@pytest.fixture
def world(shared_world: SharedWorld) -> Iterator[SharedWorld]:
    shared_world.prefix = f"{secrets.token_hex(4)}/"
    yield shared_world
    shared_world.end_test()


def test_all_links_come_back_when_the_broker_does(world: SharedWorld) -> None:
    """Each tells of the loss and of the return, and its subscriptions are in place again."""
    p = world.prefix
    clients = [world.client(f"link-{number}", (f"to/{number}", 1)) for number in range(LINKS)]
    world.kill_broker()
    for client in clients:
        client.event(Disconnected)
    world.bring_broker_back()
    for client in clients:
        client.event(Connected)
    for number in range(LINKS):
        clients[(number + 1) % LINKS].publish(f"{p}to/{number}", b"after")
    for number, client in enumerate(clients):
        assert client.messages(1) == [(f"{p}to/{number}", b"after")]


def test_a_burst_on_one_link_arrives_whole_and_in_order(world: SharedWorld) -> None:
    """2 MB at once: sends are cut short by a full socket and go on later, while another link is served, too."""
    p = world.prefix
    listener, speaker = world.client("listener", ("burst", 1)), world.client("speaker")
    other = world.client("other", ("other", 1))
    payloads = [bytes([number]) * 20_000 for number in range(100)]
    for payload in payloads:
        speaker.publish(f"{p}burst", payload)
    other.publish(f"{p}other", b"in between")
    assert listener.messages(100) == [(f"{p}burst", payload) for payload in payloads]
    assert other.messages(1) == [(f"{p}other", b"in between")]


def test_what_was_said_last_is_heard(tmp_path: Path) -> None:
    """Every farewell of many links that close one after the other."""
    broker = start_broker("mosquitto", tmp_path, port=0)
    loop, listening = MqttLoop(), MqttLoop()
    try:
        witness = Client(MqttTransport(SimpleQueue(), broker.address, "witness", loop=listening))
        witness.transport.subscribe("bye/+", 1)
        witness.transport.open()
        witness.event(Connected)
        leaving = [MqttTransport(SimpleQueue(), broker.address, f"leaving-{n}", loop=loop) for n in range(LINKS)]
        for transport in leaving:
            transport.open()
        for transport in leaving:
            Client(transport).event(Connected)
        for number, transport in enumerate(leaving):
            assert transport.publish(f"bye/{number}", b"bye")
            transport.close()
        loop.close()
        assert {topic for topic, _ in witness.messages(LINKS)} == {f"bye/{number}" for number in range(LINKS)}
        witness.transport.close()
    finally:
        listening.close()
        broker.stop()
