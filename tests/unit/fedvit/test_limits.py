"""A broker's limits are kept: a real mosquitto behind a proxy that disconnects a client which breaks one."""

import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from paho.mqtt.client import Client as RawClient
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.security.broker import Broker
from fedvit.errors import BadPayload
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.transport.pace import CATCH_UP_S, SHARE, Pace
from fedvit.wire.limits import PROFILES, BrokerLimits
from fedvit.wire.transfer import CHUNK_HEAD_BYTES, CHUNK_MESSAGE_BYTES, chunk_bytes_within
from tests.support.brokers import mosquitto
from tests.support.limiting import limiting
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worlds import Client

TIGHT = BrokerLimits(65_536, publishes_per_s=40, topics_per_subscribe=2, max_inflight=3)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with mosquitto(tmp_path_factory.mktemp("mosquitto")) as running:
        yield running


class Collected:
    """A sink of bulk."""

    def __init__(self) -> None:
        self.topics: SimpleQueue[str] = SimpleQueue()
        self.bodies: SimpleQueue[bytes] = SimpleQueue()

    def listening(self, topic: str) -> None:
        self.topics.put(topic)

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        self.bodies.put(bytes(message))


def test_pace_spaces_messages_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(10)
    sent_at = []
    for _ in range(100):
        if pace.take():
            sent_at.append(now)
        else:
            now += pace.wait_s() + 1e-9
    assert len(sent_at) > 40
    assert len(sent_at) - 2 <= SHARE * 10 * (now - 1000.0 + CATCH_UP_S)
    assert Pace().take()
    assert Pace().wait_s() == 0.0


@pytest.mark.parametrize("limits", [TIGHT, BrokerLimits()], ids=["kept", "unknown"])
def test_messages_keep_the_pace_and_their_order(broker: Broker, limits: BrokerLimits) -> None:
    """Control and bulk; a client that does not know the limits is disconnected."""
    with limiting(broker.address, limits=TIGHT) as proxy:
        listener = Client(MqttTransport(SimpleQueue(), broker.address, "listener"))
        speaker = Client(MqttTransport(SimpleQueue(), proxy.address, "speaker"))
        speaker.transport.use_limits(limits)
        sink, clients = Collected(), (listener, speaker)
        listener.transport.listen("bulk", sink)
        listener.transport.subscribe("a", 1)
        for client in clients:
            client.transport.open()
            client.event(Connected)
        assert sink.topics.get(timeout=WAIT_S) == "bulk"
        wait_until(speaker.transport.bulk_up)
        numbers = [str(number).encode() for number in range(100)]
        for number in numbers:
            speaker.publish("a", number)
        speaker.transport.send_bulk("bulk", [(number, memoryview(b"")) for number in numbers])
        if limits is TIGHT:
            assert [payload for _, payload in listener.messages(100)] == numbers
            assert [sink.bodies.get(timeout=WAIT_S) for _ in numbers] == numbers
            assert proxy.broken == []
            wait_until(lambda: speaker.transport.pending_bytes() == 0)
        else:
            wait_until(lambda: len(proxy.broken) >= 2)
            assert {reason.split(":")[0] for reason in proxy.broken} <= {"publishes_per_s", "max_inflight"}
        for client in clients:
            client.transport.close()


def test_many_topics_are_subscribed_in_parts(broker: Broker) -> None:
    with limiting(broker.address, limits=TIGHT) as proxy:
        client = Client(MqttTransport(SimpleQueue(), proxy.address, "subscriber"))
        client.transport.use_limits(TIGHT)
        for number in range(7):
            client.transport.subscribe(f"t/{number}", 1)
        client.transport.open()
        client.event(Connected)
        client.publish("t/6", b"last")
        assert client.event(Received) == Received("t/6", b"last")
        client.transport.close()
        assert proxy.broken == []


def test_limits_can_be_learnt_while_connected(broker: Broker) -> None:
    """As a device does, by the coordinator's welcome."""
    with limiting(broker.address, limits=TIGHT) as proxy:
        client = Client(MqttTransport(SimpleQueue(), proxy.address, "learner"))
        client.transport.subscribe("a", 0)
        client.transport.open()
        client.event(Connected)
        client.transport.use_limits(TIGHT)
        for number in range(100):
            client.publish("a", bytes([number]))
        assert [payload[0] for _, payload in client.messages(100)] == list(range(100))
        with pytest.raises(BadPayload):
            client.transport.publish("a", bytes(65_537))
        client.transport.close()
        assert proxy.broken == []


def test_closing_publishes_what_waits(broker: Broker) -> None:
    listener = Client(MqttTransport(SimpleQueue(), broker.address, "listener"))
    listener.transport.subscribe("bye", 1)
    speaker = Client(MqttTransport(SimpleQueue(), broker.address, "speaker"))
    speaker.transport.use_limits(TIGHT)
    for client in (listener, speaker):
        client.transport.open()
        client.event(Connected)
    for number in range(20):
        speaker.publish("bye", bytes([number]))
    speaker.transport.close()
    assert [payload[0] for _, payload in listener.messages(20)] == list(range(20))
    listener.transport.close()


def test_refused_subscription_is_asked_for_again(broker: Broker) -> None:
    """Control and bulk. Nodes of a cluster refuse while they elect a leader, and a client would hear nothing."""
    with limiting(broker.address) as proxy:
        client, sink = Client(MqttTransport(SimpleQueue(), proxy.address, "persistent")), Collected()
        client.transport.subscribe("a", 1)
        proxy.refuse = 1
        client.transport.open()
        assert client.event(Disconnected).reason == f"{proxy.address}: the broker refused a subscription"
        client.event(Connected)
        client.publish("a", b"heard")
        assert client.event(Received) == Received("a", b"heard")
        proxy.refuse = 1
        client.transport.listen("bulk", sink)
        assert sink.topics.get(timeout=WAIT_S) == "bulk"
        client.transport.send_bulk("bulk", [(b"heard", memoryview(b""))])
        assert sink.bodies.get(timeout=WAIT_S) == b"heard"
        client.transport.close()
        assert proxy.refuse == 0


def test_chunks_fit_every_profile() -> None:
    for name, limits in PROFILES.items():
        assert chunk_bytes_within(limits.max_payload_bytes) + CHUNK_HEAD_BYTES <= limits.max_payload_bytes, name
    assert chunk_bytes_within(PROFILES["aws-iot-core"].max_payload_bytes) + CHUNK_HEAD_BYTES == CHUNK_MESSAGE_BYTES


def test_proxy_notices_a_retained_message(broker: Broker) -> None:
    """So that the runs behind it show that none is sent."""
    with limiting(broker.address, retains=False) as proxy:
        raw = RawClient(CallbackAPIVersion.VERSION2, "retaining")
        raw.connect(proxy.address.host, proxy.address.port)
        raw.loop_start()
        raw.publish("a", b"kept", qos=1, retain=True)
        wait_until(lambda: proxy.broken)
        raw.disconnect()
        raw.loop_stop()
        assert set(proxy.broken) == {"retained messages"}
