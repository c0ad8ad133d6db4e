"""Devices at nats-server and RabbitMQ, with the users of deploy/: each hears and says its own topics alone.

Unlike mosquitto these brokers may end a connection that asks for too much: each attempt has a connection of its own.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received, Will
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.topics import Topics
from tests.support.access import (
    FOR_ALL,
    MAY_PUBLISH,
    MAY_RECEIVE,
    WIDEST,
    Parties,
    list_filters,
    list_targets,
    list_topics,
)
from tests.support.mqtt_client import Client
from tests.support.other_brokers import start_nats, start_rabbitmq, usual
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
HOME = Topics("home")
EVERYTHING = "fl1/home/#"
OF_NATS = ("$MQTT/#", "$MQTT/sub/#", "$MQTT/sub/+", "$JS/#", "_INBOX/#")
"""Where nats-server keeps and delivers messages with QoS 1 of all sessions."""


class Stage(NamedTuple):
    coordinator: Address
    attacker: Address
    victim: Address

    @property
    def parties(self) -> Parties:
        return Parties(HOME, "pi-2", "pi-1", self.attacker, self.victim, self.coordinator)


@pytest.fixture(scope="module", params=[kind for kind in usual() if "-" not in kind])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, after = tmp_path_factory.mktemp("users"), lambda: None
    if request.param == "nats":
        [node] = start_nats(folder, users=DEPLOY / "nats" / "users.conf")
    else:
        [node], after = start_rabbitmq(folder, definitions=DEPLOY / "rabbitmq" / "definitions.json")
    coordinator = replace(node.address, user="coordinator", password="PASSWORD-OF-THE-COORDINATOR")
    devices = [replace(node.address, user=name, password=f"PASSWORD-OF-{name}") for name in ("pi-2", "pi-1")]
    wait_until(lambda: connect(coordinator).connected, pause_s=0.1)  # RabbitMQ listens before it has read its users
    yield Stage(coordinator, *devices)
    node.stop()
    after()


def payload() -> bytes:
    return secrets.token_hex(8).encode()


def connect(address: Address, filters: Sequence[str] = (), **more: Any) -> Client:
    """With a client id like those of the programs."""
    return Client(address, client_id(address), filters, **more)


def client_id(address: Address) -> str:
    return f"{address.user}-{secrets.token_hex(4)}"


def seen(client: Client) -> set[bytes]:
    return {content for _, content in client.seen}


def test_only_users_connect(stage: Stage) -> None:
    anybody = replace(stage.attacker, user=None, password=None)
    for address in (anybody, replace(stage.attacker, password="wrong"), replace(stage.attacker, user="pi-3")):
        assert not connect(address).connected
    assert connect(stage.attacker).connected


def test_device_publishes_its_own_topics_alone(stage: Stage) -> None:
    sent: dict[str, tuple[bytes, bool]] = {}
    with connect(stage.coordinator, [EVERYTHING]) as witness:
        for qos in (0, 1):
            for what, (topic, allowed) in list_targets(stage.parties).items():
                sent[f"{what}, QoS {qos}"] = content, _ = payload(), allowed
                with connect(stage.attacker) as liar:
                    liar.publish(topic, content, qos=qos)
        last = payload()
        with connect(stage.attacker) as liar:
            liar.publish(HOME.from_device("pi-2"), last)
        wait_until(lambda: last in seen(witness))
        wait_until(lambda: {content for content, allowed in sent.values() if allowed} <= seen(witness))
        assert [what for what, (content, allowed) in sent.items() if not allowed and content in seen(witness)] == []


def test_last_will_of_a_device_is_its_own(stage: Stage) -> None:
    wills = {
        what: (payload(), *each) for what, each in list_targets(stage.parties).items() if not each[0].startswith("$")
    }
    with connect(stage.coordinator, [EVERYTHING]) as witness:
        for content, topic, _ in wills.values():
            connect(stage.attacker, will=Will(topic, content)).vanish()
        wait_until(lambda: {content for content, _, allowed in wills.values() if allowed} <= seen(witness))
        assert [what for what, (content, _, allowed) in wills.items() if not allowed and content in seen(witness)] == []


@pytest.mark.parametrize("qos", [0, 1])
def test_device_hears_its_own_topics_alone(stage: Stage, qos: int) -> None:
    """It asks for the topics of another device by name and by wildcards, and for those of the broker itself."""
    topics = list_topics(HOME, "pi-1")
    filters = {*WIDEST, *OF_NATS, *(pattern for topic in topics.values() for pattern in list_filters(topic))}
    own, last = HOME.to_device("pi-2"), payload()
    spies = [(pattern, connect(stage.attacker)) for pattern in sorted(filters)]
    for pattern, spy in spies:
        spy.subscribe([own], qos)
        spy.subscribe([pattern], qos)
    secret = {each: payload() for each in topics}
    with connect(stage.coordinator) as coordinator, connect(stage.victim, [topics["to_device"]]) as victim:
        for each, topic in topics.items():
            coordinator.publish(topic, secret[each], qos=qos)
        wait_until(lambda: secret["to_device"] in seen(victim))
        coordinator.publish(own, last, qos=qos)
        for pattern, spy in spies:
            wait_until(lambda spy=spy: last in seen(spy) or not spy.connected, f"the last message at {pattern}")  # type: ignore[misc]
    for _, spy in spies:
        spy.close()
    allowed = {secret[each] for each in FOR_ALL} | {last}
    assert {pattern: seen(spy) - allowed for pattern, spy in spies if seen(spy) - allowed} == {}


def test_each_device_hears_and_says_its_own(stage: Stage) -> None:
    """With the transport of the programs: all its subscriptions are granted."""
    topics = list_topics(HOME, "pi-1")
    inbox: SimpleQueue[object] = SimpleQueue()
    device = MqttTransport(inbox, stage.victim, client_id(stage.victim))
    for each in sorted(MAY_RECEIVE):
        device.subscribe(topics[each], 0 if each in ("broadcast", "chunks_for") else 1)
    events: list[object] = []

    def look() -> None:
        while not inbox.empty():
            events.append(inbox.get())

    def list_received() -> set[tuple[str, bytes]]:
        return {(event.topic, event.payload) for event in events if isinstance(event, Received)}

    with connect(stage.coordinator, [EVERYTHING]) as coordinator:
        device.open()
        wait_until(lambda: any(isinstance(event, Connected) for event in events), meanwhile=look)
        for each in sorted(MAY_RECEIVE):
            coordinator.publish(topics[each], each.encode())
        wait_until(lambda: list_received() == {(topics[each], each.encode()) for each in MAY_RECEIVE}, meanwhile=look)
        for each in sorted(MAY_PUBLISH):
            assert device.publish(topics[each], each.encode())
        wait_until(lambda: {each.encode() for each in MAY_PUBLISH} <= seen(coordinator))
    device.close()


def test_client_id_of_another_gives_nothing(stage: Stage) -> None:
    """A session that the victim has left open is not taken over with its messages."""
    secret, session, last = HOME.to_device("pi-1"), client_id(stage.victim), payload()
    Client(stage.victim, session, [secret], persistent=True).close()
    with connect(stage.coordinator) as coordinator:
        coordinator.publish(secret, b"secret")
        with Client(stage.attacker, session, [HOME.to_device("pi-2")], persistent=True) as liar:
            coordinator.publish(HOME.to_device("pi-2"), last)
            wait_until(lambda: last in seen(liar) or not liar.connected)
            assert b"secret" not in seen(liar)
