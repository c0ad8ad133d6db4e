"""What every transport promises: one suite over memory, embedded amqtt and mosquitto."""

import contextlib
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from paho.mqtt.client import Client as RawClient
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.security.broker.mosquitto import configuration, find_mosquitto
from coordinator.security.broker.process import Broker, BrokerProgram, claim_port
from fedvit.errors import BadPayload, ConfigError
from fedvit.transport import bulk, mqtt_connector, mqtt_loop, packets
from fedvit.transport.address import Address
from fedvit.transport.backoff import Backoff
from fedvit.transport.base import Connected, Disconnected, Received, Will
from fedvit.transport.mqtt import BOTH_VERSIONS, MqttTransport
from tests.support.brokers import mosquitto
from tests.support.codes import has_code
from tests.support.other_brokers import usual
from tests.support.waiting import WAIT_S, wait_until
from tests.support.worlds import MqttWorld, World, make_world


@pytest.fixture(scope="module", params=usual("memory", "embedded", "mosquitto", "mosquitto-3.1.1"))
def any_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    world = make_world(request.param, tmp_path_factory.mktemp("broker"))
    yield world
    world.stop()


@pytest.fixture(scope="module", params=usual("embedded", "mosquitto", "mosquitto-3.1.1"))
def any_mqtt_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    world = make_world(request.param, tmp_path_factory.mktemp("broker"))
    yield world
    world.stop()


# --- every transport ----------------------------------------------------------------------------------


def test_filters_with_wildcards_hear_what_they_cover(world: World) -> None:
    p = world.prefix
    listener = world.client("listener", ("+/ctl", 1), ("deep/#", 0))
    speaker = world.client("speaker")
    for topic in ("a/ctl", "a/b/ctl", "deep/x/y", "other", "deep"):
        speaker.publish(p + topic, topic.encode())
    speaker.publish(p + "end/ctl", b"end")
    heard = set(listener.messages(4))
    assert heard == {(p + name, name.encode()) for name in ("a/ctl", "deep/x/y", "deep")} | {(p + "end/ctl", b"end")}


def test_the_will_of_a_client_that_vanishes_is_published(world: World) -> None:
    p = world.prefix
    witness = world.client("witness", ("will", 1))
    vanish = world.doomed("doomed", Will(p + "will", b"gone"))
    vanish()
    assert witness.messages(1) == [(p + "will", b"gone")]


def test_closing_is_a_farewell_without_a_will(world: World) -> None:
    p = world.prefix
    witness = world.client("witness", ("#", 1))
    leaving = world.client("leaving", will=Will(p + "will", b"gone"))
    leaving.publish(p + "last", b"words")
    leaving.transport.close()
    again = world.client("leaving")
    again.publish(p + "marker", b"")
    assert witness.messages(2) == [(p + "last", b"words"), (p + "marker", b"")]
    assert not leaving.transport.publish(p + "ghost", b"")


def test_a_client_id_that_comes_back_ends_its_old_link_first(world: World) -> None:
    """Else the will of the old link would declare the new one dead, whenever the broker noticed. Some brokers publish
    no will then; so presence goes by hellos and the numbers of connections."""
    p = world.prefix
    witness = world.client("witness", ("#", 1))
    world.hung("same", Will(p + "will", b"gone"))
    world.client("same").publish(p + "marker", b"here")
    wills = [(p + "will", b"gone")] if world.publishes_wills_at_take_over else []
    assert witness.messages(len(wills) + 1) == [*wills, (p + "marker", b"here")]


def test_the_will_of_each_connection_has_its_number(world: World) -> None:
    """So that a will which arrives late can be told from one of the connection that is there now."""
    p = world.prefix
    witness = world.client("witness", ("will", 1))
    same = world.client("same", will=lambda number: Will(p + "will", str(number).encode()))
    first = same.transport.connection
    world.kill_broker()
    for client in (witness, same):
        client.event(Disconnected)
    world.bring_broker_back()
    for client in (witness, same):
        client.event(Connected)
    second = same.transport.connection
    assert second > first > 0
    world.cut(same.transport)
    assert witness.messages(1) == [(p + "will", str(second).encode())]


def test_after_unsubscribing_nothing_more_comes(world: World) -> None:
    p = world.prefix
    client = world.client("client", ("a", 1), ("b", 1))
    client.publish(p + "a", b"1")
    assert client.messages(1) == [(p + "a", b"1")]
    client.transport.unsubscribe(p + "a")
    client.publish(p + "a", b"2")
    client.publish(p + "b", b"3")
    assert client.messages(1) == [(p + "b", b"3")]


def test_a_subscription_made_while_connected_counts(world: World) -> None:
    client = world.client("client")
    client.transport.subscribe(world.prefix + "a", 1)
    client.publish(world.prefix + "a", b"1")
    assert client.messages(1) == [(world.prefix + "a", b"1")]


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("size", [1, 127_040])
def test_payloads_arrive_as_they_were_sent(world: World, size: int, qos: int) -> None:
    payload = bytes(index % 251 for index in range(size))
    client = world.client("client", ("a", qos))
    client.publish(world.prefix + "a", payload, qos=qos)
    assert client.messages(1) == [(world.prefix + "a", payload)]


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_of_one_topic_keep_their_order(world: World, qos: int) -> None:
    sent = [str(number).encode() for number in range(300)]
    listener = world.client("listener", ("a", qos))
    speaker = world.client("speaker")
    for payload in sent:
        speaker.publish(world.prefix + "a", payload, qos=qos)
    assert [payload for _, payload in listener.messages(len(sent))] == sent


def test_nothing_can_be_published_before_the_link_is_up(world: World) -> None:
    p = world.prefix
    listener = world.client("listener", ("#", 1))
    early = world.new_transport("early")
    assert not early.publish(p + "a", b"too early")
    early.open()
    while not isinstance(early.inbox.get(timeout=WAIT_S), Connected):
        pass
    assert early.publish(p + "a", b"now")
    assert listener.messages(1) == [(p + "a", b"now")]


def test_what_was_published_while_the_broker_was_away_is_gone_and_subscriptions_are_back(world: World) -> None:
    p = world.prefix
    listener = world.client("listener", ("a/+", 1), *((f"more/{number}", 0) for number in range(20)))
    speaker = world.client("speaker")
    for _ in range(2):
        world.kill_broker()
        for client in (listener, speaker):
            assert client.event(Disconnected).reason
        for qos in (0, 1):
            assert not speaker.transport.publish(p + "a/1", b"lost", qos=qos)
        assert speaker.transport.pending_bytes() == 0
        world.bring_broker_back()
        listener.event(Connected)
        speaker.event(Connected)
        speaker.publish(p + "a/2", b"found")
        speaker.publish(p + "more/19", b"found too")
        # QoS 0 may overtake QoS 1
        assert sorted(listener.messages(2)) == [(p + "a/2", b"found"), (p + "more/19", b"found too")]


def test_payload_bytes_are_counted_and_leave_the_process(world: World) -> None:
    p = world.prefix
    listener = world.client("listener", ("#", 1))
    speaker = world.client("speaker")
    for number in range(10):
        speaker.publish(p + "a", b"x" * 100_000, qos=number % 2)
    listener.messages(10)
    speaker.transport.publish(p + "a", b"y")
    listener.messages(1)
    assert (speaker.transport.sent_bytes, listener.transport.received_bytes) == (1_000_001, 1_000_001)
    assert (speaker.transport.received_bytes, listener.transport.sent_bytes) == (0, 0)
    while speaker.transport.pending_bytes():
        pass


def test_a_message_that_no_broker_would_take_is_refused_here(world: World) -> None:
    p = world.prefix
    client = world.client("client", ("a", 1))
    with pytest.raises(BadPayload, check=has_code("FV1210", "1048576")):
        client.transport.publish(p + "a", bytes(1024 * 1024))
    assert client.transport.sent_bytes == 0
    largest = bytes(1024 * 1024 - 64)
    client.publish(p + "a", largest)
    assert client.messages(1) == [(p + "a", largest)]


class Sink:
    """What the transport says of bulk, in order; a message as bytes, as its view is valid during the call only."""

    def __init__(self) -> None:
        self.said: SimpleQueue[Any] = SimpleQueue()

    def listening(self, topic: str) -> None:
        self.said.put(topic)

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        self.said.put((topic, bytes(message)))


def next_bulk(client: Any, sink: Sink) -> Any:
    """From the sink, or from the inbox where the transport has no thread of its own."""
    for _ in range(3000):
        if not sink.said.empty():
            return sink.said.get()
        with contextlib.suppress(Empty):
            event = client.transport.inbox.get(timeout=0.01)
            if isinstance(event, Received):
                return tuple(event)
    raise AssertionError("no bulk came")


def bring_bulk_up(client: Any) -> None:
    for _ in range(3000):
        if client.transport.bulk_up():
            return
        time.sleep(0.01)
    raise AssertionError("the bulk link did not come up")


def test_bulk_arrives_in_order_and_as_it_was_sent(world: World) -> None:
    topic = world.prefix + "bulk"
    speaker, listener, sink = world.client("speaker"), world.client("listener"), Sink()
    listener.transport.listen(topic, sink)
    assert next_bulk(listener, sink) == topic
    bring_bulk_up(speaker)
    bodies = [bytes([number]) * size for number, size in enumerate((0, 1, 126_976, 200, 500_000, 126_976) * 5)]
    for body in bodies:
        assert speaker.transport.send_bulk(topic, [(b"head", memoryview(body)), (b"", memoryview(b"tail"))])
    got = [next_bulk(listener, sink) for _ in range(2 * len(bodies))]
    assert got == [(topic, part) for body in bodies for part in (b"head" + body, b"tail")]
    sent = sum(8 + len(body) for body in bodies)
    assert (speaker.transport.sent_bytes, listener.transport.received_bytes) == (sent, sent)
    while speaker.transport.pending_bytes():
        pass


def test_bulk_that_nobody_listens_to_any_more_does_not_come(world: World) -> None:
    p = world.prefix
    speaker, listener, sink = world.client("speaker"), world.client("listener"), Sink()
    for topic in ("a", "b"):
        listener.transport.listen(p + topic, sink)
        assert next_bulk(listener, sink) == p + topic
    bring_bulk_up(speaker)
    listener.transport.stop_listening(p + "a")
    listener.transport.listen(p + "c", sink)
    assert next_bulk(listener, sink) == p + "c"
    for topic in ("a", "b"):
        assert speaker.transport.send_bulk(p + topic, [(b"x", memoryview(b"y"))])
    assert next_bulk(listener, sink) == (p + "b", b"xy")


def test_bulk_that_no_broker_would_take_is_refused_here(world: World) -> None:
    client = world.client("client")
    bring_bulk_up(client)
    with pytest.raises(BadPayload, check=has_code("FV1210", "1048576")):
        client.transport.send_bulk(world.prefix + "a", [(b"head", memoryview(bytes(1024 * 1024)))])


# --- MQTT ---------------------------------------------------------------------------------------------


def test_closing_waits_until_the_broker_has_the_last_messages(
    mqtt_world: MqttWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for seconds only, which a broker on a busy machine may need to take the first of them."""
    for module in (mqtt_loop, mqtt_connector):
        monkeypatch.setattr(module, "FAREWELL_S", WAIT_S)
    p = mqtt_world.prefix
    listener = mqtt_world.client("listener", ("a", 1))
    speaker = mqtt_world.client("speaker", ("a", 1))
    for _ in range(30):
        speaker.publish(p + "a", b"x" * 10_000)
    speaker.transport.close()
    assert len(listener.messages(30)) == 30


def test_a_closed_transport_says_nothing_more(mqtt_world: MqttWorld) -> None:
    p = mqtt_world.prefix
    other = mqtt_world.client("other", ("marker", 1))
    closed = mqtt_world.client("closed", ("#", 1))
    closed.transport.close()
    other.publish(p + "marker", b"")
    other.messages(1)
    with pytest.raises(Empty):
        closed.transport.inbox.get_nowait()


def test_the_will_of_a_client_that_only_keeps_its_socket_open_is_published(mqtt_world: MqttWorld) -> None:
    """A device without power sends no end of its connection; keep-alive must find out."""
    p = mqtt_world.prefix
    witness = mqtt_world.client("witness", ("will", 1))
    silent = RawClient(CallbackAPIVersion.VERSION2, "silent")
    silent.will_set(p + "will", b"gone", 1)
    address = mqtt_world.address()
    silent.connect(address.host, address.port, keepalive=1)
    assert witness.messages(1) == [(p + "will", b"gone")]


def test_bulk_comes_back_when_the_broker_does(mqtt_world: MqttWorld) -> None:
    topic = mqtt_world.prefix + "bulk"
    speaker, listener, sink = mqtt_world.client("speaker"), mqtt_world.client("listener"), Sink()
    listener.transport.listen(topic, sink)
    assert next_bulk(listener, sink) == topic
    bring_bulk_up(speaker)
    mqtt_world.kill_broker()
    wait_until(lambda: not speaker.transport.bulk_up())
    assert not speaker.transport.send_bulk(topic, [(b"lost", memoryview(b""))])
    mqtt_world.bring_broker_back()
    assert next_bulk(listener, sink) == topic  # said again, so that what was lost is asked for
    bring_bulk_up(speaker)
    assert speaker.transport.send_bulk(topic, [(b"found", memoryview(b""))])
    assert next_bulk(listener, sink) == (topic, b"found")


def test_the_bulk_link_exists_while_bulk_moves(mqtt_world: MqttWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that waits holds one connection."""
    monkeypatch.setattr(bulk, "IDLE_S", 0.2)
    topic = mqtt_world.prefix + "bulk"
    transport, sink = mqtt_world.client("client").transport, Sink()
    assert isinstance(transport, MqttTransport)

    def threads() -> list[str]:
        return [
            thread.name for thread in threading.enumerate() if thread.name.startswith("bulk-" + mqtt_world.prefix[:-1])
        ]

    assert threads() == []
    for _ in range(2):
        transport.listen(topic, sink)
        assert sink.said.get(timeout=WAIT_S) == topic
        assert len(threads()) == 1
        transport.stop_listening(topic)
        wait_until(lambda: threads() == [])


def test_an_inbox_that_fails_does_not_end_the_link(mqtt_world: MqttWorld) -> None:
    class Failing(SimpleQueue[object]):
        failed = False

        def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
            if isinstance(item, Received) and not self.failed:
                self.failed = True
                raise RuntimeError("full")
            super().put(item)

    inbox = Failing()
    transport = MqttTransport(inbox, mqtt_world.address(), mqtt_world.prefix + "x")
    mqtt_world.clients.append(transport)
    transport.subscribe(mqtt_world.prefix + "a", 1)
    transport.open()
    assert isinstance(inbox.get(timeout=WAIT_S), Connected)
    for payload in (b"1", b"2"):
        transport.publish(mqtt_world.prefix + "a", payload)
    assert inbox.get(timeout=WAIT_S) == Received(mqtt_world.prefix + "a", b"2")


def test_small_messages_are_not_held_back(mqtt_world: MqttWorld) -> None:
    """Without TCP_NODELAY each message after an acknowledgement waits 40 ms; no event shows it."""
    transport = mqtt_world.client("client").transport
    assert isinstance(transport, MqttTransport)
    assert transport.client is not None
    opened = transport.client.socket()
    assert isinstance(opened, socket.socket)
    assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.fixture
def unused_port() -> int:
    return claim_port()


@pytest.mark.parametrize(
    ("host", "words"), [("127.0.0.1", "connection refused"), ("nosuchhost.invalid", "not known|resolution|address")]
)
def test_each_failed_attempt_says_why(host: str, words: str, unused_port: int) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    transport = MqttTransport(inbox, Address(host, unused_port), "client")
    transport.open()
    for _ in range(2):
        event = inbox.get(timeout=WAIT_S)
        assert isinstance(event, Disconnected)
        assert event.reason.startswith(f"{host}:{unused_port}: ")
        assert re.search(words, event.reason)
    transport.close()


def test_something_that_is_no_broker_is_named(unused_port: int) -> None:
    with socket.create_server(("127.0.0.1", unused_port)) as server:
        inbox: SimpleQueue[Any] = SimpleQueue()
        transport = MqttTransport(inbox, Address("127.0.0.1", unused_port), "client")
        transport.open()
        for _ in BOTH_VERSIONS:  # it may be one that closes at an MQTT version which it does not know
            server.accept()[0].close()
        assert inbox.get(timeout=WAIT_S) == Disconnected(f"127.0.0.1:{unused_port}: closed without an MQTT answer")
        transport.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pi.local", Address("pi.local", 1883)),
        ("10.0.0.7:2000", Address("10.0.0.7", 2000)),
        ("mqtt://u:p%40ss@h:1", Address("h", 1, "u", "p@ss")),
        ("mqtts://u@h", Address("h", 8883, "u", None, True)),
        ("[::1]:7", Address("::1", 7)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected


@pytest.mark.parametrize("text", ["", "h:port", "h:0", "h:70000", "http://h", "mqtt://:p@h", "h/topic", "a..b", "a b"])
def test_addresses_that_cannot_be_used_are_named(text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1206")) as refused:
        Address.parse(text)
    assert repr(text) in str(refused.value).replace(":***@", ":p@")


def test_an_address_never_shows_its_password() -> None:
    assert "secret" not in repr(Address.parse("mqtt://u:secret@h")) + str(Address.parse("mqtt://u:secret@h"))


@pytest.mark.parametrize(
    "text",
    [
        "mqtt://u:secret@h:99999",
        "mqtt://u:secret/x@h",
        "mqtt://u:x/secret@h",
        "mqtt://u:secret#x@h",
        "mqtt://u:secret:x@h/t",
        "mqtt://u:secret\N{ACCOUNT OF}@h",
        "u:1/secret@h",
    ],
)
def test_an_address_that_cannot_be_used_does_not_show_its_password(text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1206")) as refused:
        Address.parse(text)
    assert "secret" not in str(refused.value) + str(refused.value.__cause__)


def test_a_broker_that_takes_less_says_so_before_anything_is_sent(tmp_path: Path) -> None:
    """In version 5; in 3.1.1 the broker would end the link for it, again and again."""
    with mosquitto(tmp_path, "max_packet_size 20000") as broker:
        inbox: SimpleQueue[Any] = SimpleQueue()
        transport = MqttTransport(inbox, broker.address, "client")
        transport.open()
        assert isinstance(inbox.get(timeout=WAIT_S), Connected)
        with pytest.raises(BadPayload, check=has_code("FV1210", "30000")):
            transport.publish("a", bytes(30_000))
        with pytest.raises(BadPayload, check=has_code("FV1210", "20000")):
            transport.send_bulk("a", [(b"", memoryview(bytes(30_000)))])
        transport.close()


def test_bulk_outage_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That the link was lost, and why it cannot be made anew."""
    tried: SimpleQueue[float | None] = SimpleQueue()

    def at_once(_: Backoff, up_s: float | None) -> float:
        tried.put(up_s)
        return 0.01

    monkeypatch.setattr(Backoff, "wait_s", at_once)
    caplog.set_level("INFO")
    with mosquitto(tmp_path) as broker:
        transport, sink = MqttTransport(SimpleQueue(), broker.address, "client"), Sink()
        transport.listen("bulk", sink)
        assert sink.said.get(timeout=WAIT_S) == "bulk"
    for _ in range(8):
        tried.get(timeout=WAIT_S)
    transport.close()
    said = [record for record in caplog.records if record.getMessage().startswith("bulk connection lost")]
    assert 1 <= len(said) <= 2


def test_a_bulk_link_that_only_sends_asks_whether_the_broker_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker answers chunks, and one that has said nothing for long counts as gone."""
    monkeypatch.setattr(bulk, "KEEPALIVE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, backoff = Address(*listening.getsockname()), Backoff()
        link = bulk.BulkLink(
            address, "client", lambda: None, woken=lambda: None, received=lambda _: None, backoff=backoff
        )
        link.up()
        broker, _ = listening.accept()
        with broker:
            broker.settimeout(WAIT_S)
            assert broker.recv(4096)[0] == 0x10  # CONNECT
            broker.sendall(bytes([packets.CONNACK, 2, 0, 0]))
            wait_until(link.up)
            heard = b""
            while packets.PING not in heard:
                link.send("t", [(b"head", memoryview(b"chunk"))])
                piece = broker.recv(4096)
                assert piece, "the link was ended"
                heard = heard[-1:] + piece
            link.close()


# --- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture
def tls_broker(tmp_path: Path) -> Iterator[Broker]:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    program = find_mosquitto()
    assert program is not None
    address = Address("localhost", claim_port(), tls=True, ca_file=certificate)
    config = tmp_path / "mosquitto.conf"
    tls_lines = f"certfile {certificate}\nkeyfile {key}\n"
    config.write_text(configuration("127.0.0.1", address, tmp_path / "none") + tls_lines)
    broker = Broker("mosquitto", address, BrokerProgram([str(program), "-c", str(config)], {}, tmp_path / "log"))
    yield broker
    broker.stop()


def test_bulk_goes_through_tls_too(tls_broker: Broker) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    transport, sink = MqttTransport(inbox, tls_broker.address, "client"), Sink()
    transport.listen("bulk", sink)
    assert sink.said.get(timeout=WAIT_S) == "bulk"
    bodies = [bytes([number]) * 126_976 for number in range(50)]
    assert transport.send_bulk("bulk", [(b"head", memoryview(body)) for body in bodies])
    assert [sink.said.get(timeout=WAIT_S) for _ in bodies] == [("bulk", b"head" + body) for body in bodies]
    transport.close()


def test_tls_with_a_certificate_of_ones_own(tls_broker: Broker) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    transport = MqttTransport(inbox, tls_broker.address, "client")
    transport.subscribe("a", 0)
    transport.open()
    assert inbox.get(timeout=WAIT_S) == Connected()
    payload = bytes(range(256)) * 500
    for _ in range(50):
        transport.publish("a", payload, qos=0)
    assert [inbox.get(timeout=WAIT_S) for _ in range(50)] == [Received("a", payload)] * 50
    transport.close()


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_broker: Broker) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    transport = MqttTransport(inbox, Address("localhost", tls_broker.address.port, tls=True), "client")
    transport.open()
    event = inbox.get(timeout=WAIT_S)
    assert isinstance(event, Disconnected)
    assert "the certificate is not trusted" in event.reason
    transport.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, check=has_code("FV1207", "ca.pem")):
        MqttTransport(SimpleQueue(), Address("h", 1, tls=True, ca_file=file), "client")
    assert issubclass(ssl.SSLError, OSError)
