"""A mosquitto of each kind, and a coordinator behind it."""

import socket
import threading
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from edge_client.health.broker_checks import check_broker, check_coordinator
from edge_client.health.doctor import lines, worst
from edge_client.health.doctor_context import DAY_S, DoctorContext
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import CoordinatorState, encode
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import CHUNK_MESSAGE_BYTES
from profiles.probes.broker import BrokerProbe
from tests.support.brokers import mosquitto, served
from tests.support.doctors import levels
from tests.support.waiting import WAIT_S


def test_a_broker_that_takes_everything(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        found = [*check_broker(replace(context, address=broker.address))]
        [alone] = check_coordinator(replace(context, address=broker.address))
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "ok")]
    assert (alone.check, alone.level) == ("coordinator", "warning")
    assert "no coordinator serves federation 'home'" in alone.what
    assert "--federation" in str(alone.hint)
    assert found[-1].what == f"messages of {CHUNK_MESSAGE_BYTES} bytes are accepted"


@pytest.mark.parametrize(
    ("server_is_ahead_s", "side"), [(3600.0, None), (65 * DAY_S, "behind"), (-2 * DAY_S, "ahead of")]
)
def test_the_clock_of_the_server_is_compared(
    context: DoctorContext, tmp_path: Path, server_is_ahead_s: float, side: str | None
) -> None:
    state = CoordinatorState(1, alive=True, owner="c0ffee", clock_s=context.now_s + server_is_ahead_s)
    topics, inbox = context.topics, SimpleQueue[object]()
    with mosquitto(tmp_path / "broker") as broker:
        coordinator = MqttTransport(inbox, broker.address, "coordinator")
        coordinator.subscribe(topics.device_state(context.device), 1)
        coordinator.open()
        assert inbox.get(timeout=WAIT_S) == Connected()

        def answer() -> None:
            while isinstance(inbox.get(), Received):
                coordinator.publish(topics.to_device(context.device), encode(state))

        answering = threading.Thread(target=answer)
        answering.start()
        here, *difference = check_coordinator(replace(context, address=broker.address))
        inbox.put(None)
        answering.join()
        coordinator.close()
    assert (here.check, here.level) == ("coordinator", "ok")
    assert [(found.check, found.level) for found in difference] == ([("clock", "warning")] if side else [])
    assert all(f"days {side} the server's" in found.what for found in difference)


def test_broker_that_does_not_listen(context: DoctorContext) -> None:
    [found] = check_broker(context)
    assert (found.check, found.level) == ("broker", "error")
    assert found.what == "127.0.0.1:1: connection refused"
    assert "--broker.listen 0.0.0.0 and --broker.port 1" in str(found.hint)
    # a deployment listens on all addresses from the beginning, and says itself on which ports
    [joined] = check_broker(replace(context, address=replace(context.address, cert_file=Path("certificate.pem"))))
    assert "coordinator start --broker.deployment" in str(joined.hint)
    assert "--broker.listen" not in str(joined.hint)
    assert "--broker HOST:PORT" in str(joined.hint)


def test_broker_name_that_cannot_be_resolved(context: DoctorContext) -> None:
    [found] = check_broker(replace(context, address=Address.parse("nosuchhost.invalid")))
    assert (found.check, found.level) == ("broker", "error")
    assert "'nosuchhost.invalid'" in str(found.hint)


@pytest.mark.parametrize(("user", "password"), [("fedvit", "wrong"), (None, None)])
def test_a_wrong_password(context: DoctorContext, tmp_path: Path, user: str | None, password: str | None) -> None:
    with mosquitto(tmp_path / "broker", password="secret") as broker:
        wrong = replace(broker.address, user=user, password=password)
        found = [*check_broker(replace(context, address=wrong))]
        right = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "error")]
    assert found[-1].what == "broker refused: not authorised"
    assert "mqtt://USER:PASSWORD@HOST" in str(found[-1].hint)
    assert "wrong" not in "".join(map(lines, found))
    assert worst(right) == "ok"


@pytest.mark.parametrize("setting", ["message_size_limit 20000", "max_packet_size 20000"])
def test_a_broker_that_takes_small_messages_only(
    context: DoctorContext, tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of mosquitto's limits drops what is larger without a word, the other ends the connection."""
    monkeypatch.setattr(BrokerProbe.seconds, "__defaults__", (0.5,))
    with mosquitto(tmp_path / "broker", setting) as broker:
        found = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "error")]
    assert f"a message of {CHUNK_MESSAGE_BYTES} bytes" in found[-1].what
    assert "16384 bytes are" in found[-1].what
    assert "message_size_limit" in str(found[-1].hint)


def test_access_rules_that_take_no_message(
    context: DoctorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokerProbe.seconds, "__defaults__", (0.5,))
    (tmp_path / "rules").write_text("user fedvit\ntopic read fl1/#\n")
    (tmp_path / "rules").chmod(0o600)
    with mosquitto(tmp_path / "broker", f"acl_file {tmp_path / 'rules'}", password="secret") as broker:
        found = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "error")]
    assert "below fl1/home/d/pi/up/" in str(found[-1].hint)


def test_tls(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker", tls=True) as broker:
        trusted = [*check_broker(replace(context, address=broker.address))]
        stranger = [*check_broker(replace(context, address=replace(broker.address, ca_file=None)))]
        no_file = replace(broker.address, ca_file=tmp_path / "no.pem")
        unreadable = [*check_broker(replace(context, address=no_file))]
        plain = [*check_broker(replace(context, address=replace(broker.address, tls=False, ca_file=None)))]
    assert levels(trusted) == [("broker", "ok"), ("tls", "ok"), ("login", "ok"), ("messages", "ok")]
    assert trusted[1].what.startswith("TLSv1.")
    assert levels(stranger) == [("broker", "ok"), ("tls", "error")]
    assert "the certificate is not trusted" in stranger[1].what
    assert "--ca-file" in str(stranger[1].hint)
    assert levels(unreadable) == [("broker", "ok"), ("tls", "error")]
    assert "no.pem" in unreadable[1].what
    assert levels(plain) == [("broker", "ok"), ("login", "error")]
    assert "mqtts://" in str(plain[1].hint)


def test_tls_at_a_port_without(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        found = [*check_broker(replace(context, address=replace(broker.address, tls=True)))]
    assert levels(found) == [("broker", "ok"), ("tls", "error")]


def test_something_that_is_no_broker(context: DoctorContext) -> None:
    """It takes the connection and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        steps = check_broker(replace(context, address=Address("127.0.0.1", port)))
        assert next(steps).level == "ok"
        server.accept()[0].close()
        server.close()
        [found] = steps
    assert (found.check, found.level) == ("login", "error")


def test_a_coordinator_is_found_by_its_federation(context: DoctorContext, tmp_path: Path) -> None:
    """A service, over a real broker; a run's coordinator answers alike."""
    with mosquitto(tmp_path / "broker") as broker, served(broker.address) as said:
        here = replace(context, address=broker.address)
        [found] = check_coordinator(here)
        [elsewhere] = check_coordinator(replace(here, topics=Topics("hmoe")))
    assert (found.level, found.hint) == ("ok", None)
    assert found.what.startswith("coordinator serve on ")
    assert elsewhere.level == "warning"
    assert "no coordinator serves federation 'hmoe'" in elsewhere.what
    assert said == [], "it did not join"
