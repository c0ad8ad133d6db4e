"""Devices of a deployment at a real mosquitto with the generated configuration: each hears and says its own alone.

Acts that are forbidden to it: test_forbidden_acts.py.
"""

import re
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.security.broker.process import Broker
from coordinator.security.folder import COORDINATOR, Deployment, make_token
from fedvit.transport.address import Address
from fedvit.transport.base import Will
from fedvit.wire import topics as topics_module
from fedvit.wire.messages import BlobNack, Progress, encode
from fedvit.wire.topics import Topics
from tests.support.access import DIGEST, MAY_PUBLISH, MAY_RECEIVE, Parties, list_topics
from tests.support.corpus import make_hello
from tests.support.deployments import make_deployment, make_device, run_broker
from tests.support.mqtt_client import Client
from tests.support.waiting import wait_until

HOME = Topics("home")
KEPT_BYTES = 24_000_000
"""Most growth of the broker's memory by a flood: buffers and fragmentation."""
NAMES, NAME_BYTES, NAMES_COST = 160, 50_000, 1.5
"""Long names in subscriptions, and bytes of the broker's memory for each of theirs."""


class Stage(NamedTuple):
    deployment: Deployment
    broker: Broker
    pi_1: Address
    pi_2: Address
    folder: Path


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("isolation")
    deployment = make_deployment(folder / "deployment")
    pi_1, pi_2 = (make_device(deployment, folder / "keys", name) for name in ("pi-1", "pi-2"))
    with run_broker(deployment) as broker:
        broker.reload()  # as after each enrolment: what holds must hold afterwards, too
        yield Stage(deployment, broker, pi_1, pi_2, folder)


def test_no_kind_of_topic_is_forgotten() -> None:
    """The tree's drawing names every topic; each line is one of those that are tried here."""
    drawn = re.findall(r"^ +(fl1/\S+)", topics_module.__doc__ or "", re.MULTILINE)
    assert len(drawn) > 8
    tried = set(list_topics(HOME, "DEV", "TOKEN").values())
    for line in drawn:
        assert line.replace("/F/", "/home/").replace("BLOB", "0123456789abcdef") in tried, line
    made = {name for name, made in vars(Topics).items() if callable(made) or isinstance(made, property)}
    made = {name for name in made if not name.startswith("_")} - {"device_of", "from_all_devices"}
    assert made <= list_topics(HOME, "x").keys()


# --- floods -------------------------------------------------------------------------------------------


def flood_retained(parties: Parties) -> None:
    base = parties.topics.upload(parties.attacker, DIGEST)[:-16]
    for payload in (bytes(900_000), b"small"):
        for number in range(6):
            with Client(parties.as_attacker, "hoarder") as client:
                client.publish(f"{base}{number:016x}", payload, retain=True)


def flood_sessions(parties: Parties) -> None:
    """Three offline sessions are subscribed to every topic of the device."""
    own = [f"fl1/home/d/{parties.attacker}/#", *list_topics(parties.topics, parties.attacker).values()]
    for number in range(3):
        Client(parties.as_attacker, f"stayer-{number}", own, persistent=True).close()
    with Client(parties.as_attacker, "talker") as talker:
        for topic in (*own[1:], *[parties.topics.probe(parties.attacker)] * 40):
            talker.publish(topic, bytes(200_000))
    for number in range(3):
        Client(parties.as_attacker, f"stayer-{number}").close()


def flood_unfinished(parties: Parties) -> None:
    """Messages of QoS 2 are never finished."""
    with Client(parties.as_attacker, "dawdler") as client:
        for _ in range(40):
            if not client.publish(parties.topics.probe(parties.attacker), bytes(200_000), qos=2):
                break


def flood_wills(parties: Parties) -> None:
    will = Will(parties.topics.device_state(parties.attacker), bytes(60_000))
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context(Client(parties.as_attacker, f"testator-{number}", will=will))


def flood_subscriptions(parties: Parties) -> None:
    """Names of 50 kB, in sessions that outlive the connection: mosquitto has no limit for them."""
    for version in (MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5):
        with Client(parties.as_attacker, "collector", version=version, persistent=True) as client:
            for number in range(NAMES // 8):
                client.subscribe([f"{number}-{piece}-" + "x" * NAME_BYTES for piece in range(4)])


def flood_half_open(parties: Parties) -> None:
    """Connections never finish their handshake; an honest device connects meanwhile."""
    address = parties.as_attacker
    with ExitStack() as stack:
        for number in range(30):
            connection = stack.enter_context(socket.create_connection((address.host, address.port), 10))
            if number % 2:
                connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        with Client(parties.as_victim, f"honest-{secrets.token_hex(4)}") as honest:
            assert honest.connected


def flood_coordinator(parties: Parties) -> None:
    """Hellos, progress, wants and invalid bytes, as fast as possible."""
    messages = [
        encode(make_hello(secrets.token_hex(8), ("class-0", "class-1"))),
        encode(Progress("pentest", 1, "train", 1, 2, 0.5)),
        encode(BlobNack(DIGEST, ((0, 1),), 1)),
        secrets.token_bytes(60_000),
    ]
    with Client(parties.as_attacker, "talker") as talker:
        for number in range(300):
            talker.publish(parties.topics.from_device(parties.attacker), messages[number % 4], qos=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flood",
    [
        flood_retained, flood_sessions, flood_unfinished, flood_wills, flood_subscriptions, flood_half_open,
        flood_coordinator,
    ],
)  # fmt: skip
def test_one_device_cannot_fill_the_broker(stage: Stage, flood: Callable[[Parties], None]) -> None:
    """Little of a flood stays there, and an honest device is served meanwhile and afterwards."""
    parties = Parties(HOME, "pi-2", "pi-1", stage.pi_2, stage.pi_1, stage.deployment.address)
    bound = KEPT_BYTES + (NAMES_COST * NAMES * NAME_BYTES if flood is flood_subscriptions else 0)
    with (
        Client(stage.deployment.address, "coordinator", [HOME.from_device("pi-1")]) as coordinator,
        Client(stage.pi_1, "honest") as honest,
    ):
        before = stage.broker.rss_bytes()
        flood(parties)
        assert stage.broker.rss_bytes() - before <= bound
        assert honest.publish(HOME.from_device("pi-1"), b"still here")
        wait_until(lambda: coordinator.seen, "the honest device's message did not come")


# --- its own ------------------------------------------------------------------------------------------


def test_each_device_hears_and_says_its_own(stage: Stage) -> None:
    names = list_topics(HOME, "pi-1")
    with (
        Client(stage.deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(stage.pi_1, "pi-1", list(names.values())) as pi_1,
    ):
        for topic in names.values():
            pi_1.publish(topic, b"up")
            coordinator.publish(topic, b"down")
        coordinator.publish(names["chunks_for"], b"last")
        wait_until(lambda: (names["chunks_for"], b"last") in pi_1.seen, "the last")
        wait_until(lambda: (names["chunks_for"], b"last") in coordinator.seen, "the last")
    heard = {topic for topic, payload in pi_1.seen if payload == b"down"}
    said = {topic for topic, payload in coordinator.seen if payload == b"up"}
    assert heard == {names[name] for name in MAY_RECEIVE}
    assert said == {names[name] for name in MAY_PUBLISH}


def test_a_password_does_not_replace_a_certificate(stage: Stage) -> None:
    """The certificate says which device it is, whatever user a client names."""
    with (
        Client(stage.deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(replace(stage.pi_2, user=COORDINATOR, password="x"), "liar", ["#"]) as liar,
    ):
        liar.publish(HOME.to_device("pi-1"), b"lie")
        liar.publish(HOME.from_device("pi-2"), b"last")
        wait_until(lambda: (HOME.from_device("pi-2"), b"last") in coordinator.seen, "what it may say")
    assert b"lie" not in {payload for _, payload in coordinator.seen}


def test_a_device_is_no_broker(stage: Stage) -> None:
    """Its certificate is from the same authority, and yet does not pass for a server's."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert stage.pi_2.cert_file is not None
    server.load_cert_chain(stage.pi_2.cert_file, stage.pi_2.key_file)
    client = ssl.create_default_context(cafile=stage.pi_1.ca_file)
    client.check_hostname = False
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(ours, theirs, server_side=False)
    there = server.wrap_bio(theirs, ours, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        here.do_handshake()
    with pytest.raises(ssl.SSLWantReadError):
        there.do_handshake()
    with pytest.raises(ssl.SSLCertVerificationError, match=r"unsuitable|purpose"):
        here.do_handshake()


def test_a_token_is_good_for_its_own_enrolment_alone(stage: Stage) -> None:
    """At the listener for tokens nobody hears or says anything but what belongs to the own token."""
    deployment = stage.deployment
    mine, theirs = (make_token(deployment, name, 60.0) for name in ("pi-3", "pi-4"))
    stage.broker.reload()
    base = Address("127.0.0.1", deployment.settings.enrolment_port, tls=True)
    wait_until(lambda: Client(replace(base, user=mine.id, password=mine.login), "early").connected, "the reload")
    assert not Client(base, "anonymous").connected
    assert not Client(replace(base, user=mine.id, password=theirs.login), "wrong").connected
    assert not Client(replace(base, user="pi-1", password=""), "name").connected
    everything = ["#", *list_topics(HOME, "pi-1", theirs.id).values(), HOME.enrolment_reply(mine.id)]
    with (
        Client(deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(replace(base, user=mine.id, password=mine.login), "newcomer", everything) as newcomer,
    ):
        for topic in (*list_topics(HOME, "pi-1", theirs.id).values(), *list_topics(HOME, "pi-3", theirs.id).values()):
            newcomer.publish(topic, b"lie")
            coordinator.publish(topic, b"secret")
        newcomer.publish(HOME.enrolment(mine.id), b"last")
        coordinator.publish(HOME.enrolment_reply(mine.id), b"last")
        wait_until(lambda: (HOME.enrolment(mine.id), b"last") in coordinator.seen, "the question")
        wait_until(lambda: newcomer.seen, "the answer")
    assert newcomer.seen == [(HOME.enrolment_reply(mine.id), b"last")]
    assert b"lie" not in {payload for _, payload in coordinator.seen}


def test_revoked_at_once(stage: Stage) -> None:
    """Rules alone silence an open connection in both directions; the list of revoked certificates keeps out the next.

    Then the restart, which ends it.
    """
    deployment = stage.deployment
    lost = make_device(deployment, stage.folder / "lost", "pi-5")
    with (
        Client(deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(lost, "pi-5", [HOME.to_device("pi-5"), HOME.broadcast(DIGEST)]) as pi_5,
        Client(stage.pi_1, "pi-1", [HOME.to_device("pi-1"), HOME.broadcast(DIGEST)]) as pi_1,
    ):
        with deployment.change() as rows:
            rows.revocations.revoke("pi-5", time.time())
        stage.broker.reload()
        wait_until(lambda: not Client(lost, "again").connected, "the revocation")
        pi_5.publish(HOME.from_device("pi-5"), b"too late")
        coordinator.publish(HOME.to_device("pi-5"), b"secret")
        coordinator.publish(HOME.broadcast(DIGEST), b"model")
        pi_1.publish(HOME.from_device("pi-1"), b"last")
        wait_until(lambda: (HOME.from_device("pi-1"), b"last") in coordinator.seen, "another device's message")
        wait_until(lambda: (HOME.broadcast(DIGEST), b"model") in pi_1.seen, "what is for all")
        assert not pi_5.seen
        assert (HOME.from_device("pi-5"), b"too late") not in coordinator.seen
        stage.broker.restart()
        wait_until(lambda: not pi_5.connected, "the end of its connection")
    assert not Client(lost, "again").connected
    assert Client(stage.pi_1, "pi-1").connected
