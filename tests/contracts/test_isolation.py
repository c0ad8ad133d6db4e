"""Devices of a deployment, at a real mosquitto with the generated configuration: each hears and says its own alone.

The attacks are those of `python -m bench pentest`.
"""

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from bench.pentest.access import (
    DIGEST,
    MAY_PUBLISH,
    MAY_RECEIVE,
    Parties,
    posing,
    publishing,
    retaining,
    sessions,
    subscribing,
    topics_of,
    wills,
)
from bench.pentest.client import Client, wait_for
from bench.pentest.floods import REDUCED, floods
from bench.pentest.parties import device_address, make_deployment, running
from bench.pentest.report import Attempt
from coordinator.security.authority import DAY_S, Authority
from coordinator.security.broker.process import Broker
from coordinator.security.folder import COORDINATOR, Deployment, make_token
from fedvit.transport.address import Address
from fedvit.wire import topics as topics_module
from fedvit.wire.topics import Topics

HOME = Topics("home")


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
    pi_1, pi_2 = (device_address(deployment, folder / "keys", name) for name in ("pi-1", "pi-2"))
    with running(deployment) as broker:
        broker.reload()  # as after each enrolment: what holds must hold afterwards, too
        yield Stage(deployment, broker, pi_1, pi_2, folder)


def test_no_kind_of_topic_is_forgotten() -> None:
    """The tree's drawing names every topic; each line is one of those that are tried here."""
    drawn = re.findall(r"^ +(fl1/\S+)", topics_module.__doc__ or "", re.MULTILINE)
    assert len(drawn) > 8
    tried = set(topics_of(HOME, "DEV", "TOKEN").values())
    for line in drawn:
        assert line.replace("/F/", "/home/").replace("BLOB", "0123456789abcdef") in tried, line
    made = {name for name, made in vars(Topics).items() if callable(made) or isinstance(made, property)}
    made = {name for name in made if not name.startswith("_")} - {"device_of", "from_all_devices"}
    assert made <= topics_of(HOME, "x").keys()


@pytest.mark.parametrize(
    "part", [publishing, wills, retaining, subscribing, posing, sessions], ids=lambda part: part.__name__
)
def test_a_device_that_was_let_in_can_do_nothing_else(
    stage: Stage, part: Callable[[Parties], Iterable[Attempt]]
) -> None:
    parties = Parties(HOME, "pi-2", "pi-1", stage.pi_2, stage.pi_1, stage.deployment.address)
    attempts = list(part(parties))
    assert len(attempts) >= 2
    assert [one.line for one in attempts if not one.held] == []


def test_one_device_cannot_fill_the_broker(stage: Stage) -> None:
    """What it floods the broker with does not stay there, and an honest device is served meanwhile and afterwards."""
    parties = Parties(HOME, "pi-2", "pi-1", stage.pi_2, stage.pi_1, stage.deployment.address)
    with (
        Client(stage.deployment.address, "coordinator", [HOME.from_device("pi-1")]) as coordinator,
        Client(stage.pi_1, "honest") as honest,
    ):
        before = stage.broker.rss_bytes()
        attempts = list(floods(parties, REDUCED, stage.broker.rss_bytes))
        assert [one.line for one in attempts if not one.held] == []
        assert stage.broker.rss_bytes() - before < 40_000_000  # mostly 16 MB of names that stay for an hour
        assert honest.publish(HOME.from_device("pi-1"), b"still here")
        wait_for(lambda: coordinator.seen, "the honest device's message")


def test_each_device_hears_and_says_its_own(stage: Stage) -> None:
    names = topics_of(HOME, "pi-1")
    with (
        Client(stage.deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(stage.pi_1, "pi-1", list(names.values())) as pi_1,
    ):
        for topic in names.values():
            pi_1.publish(topic, b"up")
            coordinator.publish(topic, b"down")
        coordinator.publish(names["dedicated"], b"last")
        wait_for(lambda: (names["dedicated"], b"last") in pi_1.seen, "the last")
        wait_for(lambda: (names["dedicated"], b"last") in coordinator.seen, "the last")
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
        wait_for(lambda: (HOME.from_device("pi-2"), b"last") in coordinator.seen, "what it may say")
    assert b"lie" not in {payload for _, payload in coordinator.seen}


# --- who does not come in -----------------------------------------------------------------------------


def test_who_has_no_valid_certificate_does_not_connect(stage: Stage) -> None:
    deployment, keys = stage.deployment, stage.folder / "others"
    stranger = Authority.create("fedvit home", time.time())
    namesake = Authority.create(deployment.authority.certificate.subject.rfc4514_string()[3:], time.time())
    now_s = time.time()
    cases = {
        "none": replace(stage.pi_1, cert_file=None, key_file=None),
        "foreign": device_address(deployment, keys / "foreign", "pi-1", authority=stranger),
        "namesake": device_address(deployment, keys / "namesake", "pi-1", authority=namesake),
        "expired": device_address(deployment, keys / "expired", "pi-1", issued_s=now_s - 91 * DAY_S),
        "not yet": device_address(deployment, keys / "not-yet", "pi-1", begin_s=now_s + 5 * DAY_S),
        "password": Address("127.0.0.1", deployment.settings.port, "fedvit", "secret", True, stage.pi_1.ca_file),
        "plain": Address("127.0.0.1", deployment.settings.port),
    }
    for what, address in cases.items():
        outcome = Client(address, "stranger").outcome
        assert "Success" not in outcome, what
        assert outcome, what
    assert Client(stage.pi_1, "pi-1").connected


@pytest.mark.parametrize("listener", ["port", "enrolment_port"])
def test_a_broker_speaks_no_older_tls(stage: Stage, listener: str) -> None:
    context = ssl.create_default_context(cafile=stage.pi_1.ca_file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", getattr(stage.deployment.settings, listener)), 10) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


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
    wait_for(lambda: Client(replace(base, user=mine.id, password=mine.login), "early").connected, "the reload")
    assert not Client(base, "anonymous").connected
    assert not Client(replace(base, user=mine.id, password=theirs.login), "wrong").connected
    assert not Client(replace(base, user="pi-1", password=""), "name").connected
    everything = ["#", *topics_of(HOME, "pi-1", theirs.id).values(), HOME.enrolment_reply(mine.id)]
    with (
        Client(deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(replace(base, user=mine.id, password=mine.login), "newcomer", everything) as newcomer,
    ):
        for topic in (*topics_of(HOME, "pi-1", theirs.id).values(), *topics_of(HOME, "pi-3", theirs.id).values()):
            newcomer.publish(topic, b"lie")
            coordinator.publish(topic, b"secret")
        newcomer.publish(HOME.enrolment(mine.id), b"last")
        coordinator.publish(HOME.enrolment_reply(mine.id), b"last")
        wait_for(lambda: (HOME.enrolment(mine.id), b"last") in coordinator.seen, "the question")
        wait_for(lambda: newcomer.seen, "the answer")
    assert newcomer.seen == [(HOME.enrolment_reply(mine.id), b"last")]
    assert b"lie" not in {payload for _, payload in coordinator.seen}


def test_revoked_at_once(stage: Stage) -> None:
    """Rules alone silence an open connection in both directions; the list of revoked certificates keeps out the next.

    Then the restart, which ends it.
    """
    deployment = stage.deployment
    lost = device_address(deployment, stage.folder / "lost", "pi-5")
    with (
        Client(deployment.address, "coordinator", ["fl1/home/#"]) as coordinator,
        Client(lost, "pi-5", [HOME.to_device("pi-5"), HOME.broadcast(DIGEST)]) as pi_5,
        Client(stage.pi_1, "pi-1", [HOME.to_device("pi-1"), HOME.broadcast(DIGEST)]) as pi_1,
    ):
        with deployment.change() as rows:
            rows.revoke("pi-5", time.time())
        stage.broker.reload()
        wait_for(lambda: not Client(lost, "again").connected, "the revocation")
        pi_5.publish(HOME.from_device("pi-5"), b"too late")
        coordinator.publish(HOME.to_device("pi-5"), b"secret")
        coordinator.publish(HOME.broadcast(DIGEST), b"model")
        pi_1.publish(HOME.from_device("pi-1"), b"last")
        wait_for(lambda: (HOME.from_device("pi-1"), b"last") in coordinator.seen, "another device's message")
        wait_for(lambda: (HOME.broadcast(DIGEST), b"model") in pi_1.seen, "what is for all")
        assert not pi_5.seen
        assert (HOME.from_device("pi-5"), b"too late") not in coordinator.seen
        stage.broker.restart()
        wait_for(lambda: not pi_5.connected, "the end of its connection")
    assert not Client(lost, "again").connected
    assert Client(stage.pi_1, "pi-1").connected
