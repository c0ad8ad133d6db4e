"""Acts that a deployment forbids to strangers, to devices that it has let in, and to holders of a token.

A real mosquitto and the service of a real deployment. mosquitto grants forbidden subscriptions and acknowledges
forbidden messages, so only delivered messages count. The witness is a client with the coordinator's certificate, which
receives everything.
"""

import secrets
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from paho.mqtt.enums import MQTTProtocolVersion

from coordinator.security.authority import DAY_S, Authority
from coordinator.security.folder import COORDINATOR, Deployment, make_token
from fedvit.transport.address import Address
from fedvit.transport.base import Will
from fedvit.wire.enrolment import (
    FROM_COORDINATOR,
    FROM_DEVICE,
    AnyEnrolment,
    JoinGranted,
    JoinRefused,
    JoinRequest,
    Token,
    seal,
    unseal,
)
from fedvit.wire.topics import Topics
from tests.support.access import FOR_ALL, MAY_PUBLISH, WIDEST, Parties, list_filters, list_targets, list_topics
from tests.support.deployments import make_deployment, make_device, make_request, serve_deployment
from tests.support.mqtt_client import Client
from tests.support.waiting import wait_until

HOME = Topics("home")
EVERYTHING = "fl1/home/#"
ATTACKER, VICTIM = "attacker", "victim"
QOS_2 = 2
"""A deployment's broker refuses it, since it would have to keep unfinished messages."""
VERSIONS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}
OWN = {name: topic for name, topic in list_topics(HOME, ATTACKER).items() if name in MAY_PUBLISH}
OTHERS = list_topics(HOME, VICTIM)


class Stage(NamedTuple):
    deployment: Deployment
    folder: Path
    parties: Parties


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("acts")
    deployment = make_deployment(folder / "deployment")
    attacker, victim = (make_device(deployment, folder / "keys", name) for name in (ATTACKER, VICTIM))
    parties = Parties(HOME, ATTACKER, VICTIM, attacker, victim, deployment.address)
    with serve_deployment(deployment):
        yield Stage(deployment, folder, parties)


def make_payload() -> bytes:
    return secrets.token_hex(8).encode()


def make_witness(stage: Stage, *filters: str) -> Client:
    return Client(stage.parties.as_coordinator, f"witness-{secrets.token_hex(4)}", filters)


def flush(witness: Client, listener: Client) -> None:
    """Wait until all earlier messages have reached the listener."""
    last = make_payload()
    for device in (VICTIM, ATTACKER):
        witness.publish(HOME.to_device(device), last)
    wait_until(lambda: last in listener.payloads, "the last message did not come")


# --- a device that was let in -------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, QOS_2])
def test_device_publishes_only_its_own_topics(stage: Stage, qos: int) -> None:
    """The victim receives nothing at all."""
    sent: dict[str, tuple[bytes, bool]] = {}
    with (
        make_witness(stage, EVERYTHING) as witness,
        Client(stage.parties.as_victim, VICTIM, list(OTHERS.values())) as victim,
        ExitStack() as liars,
    ):
        liar = liars.enter_context(Client(stage.parties.as_attacker, "liar"))
        for name, (topic, allowed) in list_targets(stage.parties).items():
            sent[name] = payload, _ = make_payload(), allowed and qos < QOS_2
            if not liar.publish(topic, payload, qos=qos):
                liar = liars.enter_context(Client(stage.parties.as_attacker, "liar"))
        last = make_payload()
        liar.publish(HOME.from_device(ATTACKER), last)
        wait_until(lambda: last in witness.payloads, "the attacker's last message did not come")
        flush(witness, victim)
    delivered = {name for name, (payload, _) in sent.items() if payload in witness.payloads}
    assert delivered == {name for name, (_, allowed) in sent.items() if allowed}
    assert not {payload for payload, _ in sent.values()} & victim.payloads


def test_last_will_of_a_device_is_its_own(stage: Stage) -> None:
    """The broker publishes a will in the device's name when its connection is lost."""
    wrong = []
    with make_witness(stage, EVERYTHING) as witness:
        for name, (topic, allowed) in list_targets(stage.parties).items():
            if topic.startswith("$"):
                continue  # a will cannot have such a topic
            payload, last, client_id = make_payload(), make_payload(), f"doomed-{secrets.token_hex(4)}"
            Client(stage.parties.as_attacker, client_id, will=Will(topic, payload)).vanish()
            # with the same id again, the broker first ends the old connection and publishes its will
            with Client(stage.parties.as_attacker, client_id) as after:
                after.publish(HOME.from_device(ATTACKER), last)
            wait_until(lambda last=last: last in witness.payloads, "a later message did not come")  # type: ignore[misc]
            wrong += [name] if (payload in witness.payloads) != allowed else []
    assert wrong == []


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
@pytest.mark.parametrize("topic", OWN.values(), ids=OWN)
def test_nothing_is_retained(stage: Stage, topic: str, version: MQTTProtocolVersion) -> None:
    """The connection of a device that asks for it ends, and a later subscription receives nothing."""
    attacker = stage.parties.as_attacker
    with Client(attacker, "hoarder", version=version) as hoarder:
        assert not hoarder.publish(topic, b"retained", retain=True)
    doomed = Client(attacker, "hoarder", will=Will(topic, b"retained"), retain_will=True, version=version)
    assert not doomed.connected
    doomed.vanish()
    with make_witness(stage, EVERYTHING) as later:
        flush(later, later)
    assert b"retained" not in later.payloads


@pytest.mark.parametrize("qos", [0, 1, QOS_2])
def test_device_receives_only_its_own_topics(stage: Stage, qos: int) -> None:
    """It subscribes to every topic of the victim, by name and by wildcards, and to everything."""
    filters = {*WIDEST, *(pattern for topic in OTHERS.values() for pattern in list_filters(topic))}
    own, last = HOME.to_device(ATTACKER), make_payload()
    with (
        make_witness(stage) as coordinator,
        Client(stage.parties.as_victim, VICTIM) as victim,
        Client(stage.parties.as_attacker, "spy", sorted(filters), qos=qos) as spy,
    ):
        for name, topic in OTHERS.items():
            coordinator.publish(topic, f"coordinator {name}".encode())
            victim.publish(topic, f"victim {name}".encode())
        coordinator.publish(own, last)
        wait_until(lambda: last in spy.payloads, "the message to the attacker did not come")
    received = {(topic, payload) for topic, payload in spy.seen if topic != own}
    assert received == {(OTHERS[name], f"coordinator {name}".encode()) for name in FOR_ALL}


@pytest.mark.parametrize("client_id", [VICTIM, "coordinator", "fedvit.coordinator"])
def test_client_id_of_another_gives_nothing(stage: Stage, client_id: str) -> None:
    secret = HOME.to_device(VICTIM)
    with (
        make_witness(stage, EVERYTHING) as witness,
        Client(stage.parties.as_attacker, client_id, ["#", secret]) as liar,
    ):
        witness.publish(secret, b"secret")
        for topic in (HOME.from_device(VICTIM), HOME.coordinator_state, secret):
            liar.publish(topic, b"lie")
        flush(witness, liar)
    assert b"lie" not in witness.payloads
    assert b"secret" not in liar.payloads


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
def test_device_does_not_fill_the_queue_of_its_own_session(stage: Stage, version: MQTTProtocolVersion) -> None:
    """A session that outlives the connection may queue messages of the coordinator, none of the device itself."""
    attacker, own = stage.parties.as_attacker, list(list_topics(HOME, ATTACKER).values())
    filters = [f"fl1/home/d/{ATTACKER}/#", *own]
    Client(attacker, "stayer", filters, version=version, persistent=True).close()
    with Client(attacker, "talker") as talker:
        for topic in own:
            talker.publish(topic, b"to myself")
    with make_witness(stage) as witness, Client(attacker, "stayer", filters, version=version, persistent=True) as back:
        flush(witness, back)
    Client(attacker, "stayer").close()  # a clean session replaces the persistent one
    assert b"to myself" not in back.payloads


# --- strangers ----------------------------------------------------------------------------------------


def make_invalid(stage: Stage, act: str) -> Address:
    """Make the broker's address with an invalid certificate, or without one."""
    deployment, now_s, valid = stage.deployment, time.time(), stage.parties.as_attacker
    bare = replace(valid, cert_file=None, key_file=None)
    authority = deployment.authority.certificate.subject.rfc4514_string()[3:]

    def make(name: str = "stranger", **more: object) -> Address:
        return make_device(deployment, stage.folder / act, name, registered=False, **more)  # type: ignore[arg-type]

    makers: dict[str, Callable[[], Address]] = {
        "no certificate": lambda: bare,
        "another authority": lambda: make(authority=Authority.create("a stranger", now_s)),
        "another authority and the coordinator's name": lambda: make(
            COORDINATOR, authority=Authority.create("a stranger", now_s)
        ),
        "a namesake authority": lambda: make(authority=Authority.create(authority, now_s)),
        "an expired certificate": lambda: make(issued_s=now_s - 91 * DAY_S),
        "a certificate of the future": lambda: make(begin_s=now_s + 5 * DAY_S),
        "a password": lambda: replace(bare, user=COORDINATOR, password="secret"),
        "the broker's own certificate": lambda: replace(
            valid, cert_file=deployment.folder / "server.pem", key_file=deployment.folder / "server.key"
        ),
        "plain TCP": lambda: Address(valid.host, valid.port),
        "plain TCP at the listener for tokens": lambda: Address(valid.host, deployment.settings.enrolment_port),
    }
    return makers[act]()


@pytest.mark.parametrize(
    "act",
    [
        "no certificate", "another authority", "another authority and the coordinator's name", "a namesake authority",
        "an expired certificate", "a certificate of the future", "a password", "the broker's own certificate",
        "plain TCP", "plain TCP at the listener for tokens",
    ],
)  # fmt: skip
def test_stranger_does_not_connect(stage: Stage, act: str) -> None:
    with Client(make_invalid(stage, act), "stranger") as stranger:
        assert stranger.outcome
    assert not stranger.has_connected
    with Client(stage.parties.as_attacker, "valid") as valid:
        assert valid.connected


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
@pytest.mark.parametrize("listener", ["port", "enrolment_port"])
def test_broker_speaks_no_older_tls(stage: Stage, listener: str, version: ssl.TLSVersion) -> None:
    device = stage.parties.as_attacker
    assert device.cert_file is not None
    context = ssl.create_default_context(cafile=device.ca_file)
    context.check_hostname = False
    context.load_cert_chain(device.cert_file, device.key_file)
    context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise this side would refuse
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the old versions are tried on purpose
        context.minimum_version = context.maximum_version = version
    port = getattr(stage.deployment.settings, listener)
    with socket.create_connection((device.host, port), 10) as plain, pytest.raises(OSError):
        context.wrap_socket(plain, server_hostname=device.host)


def test_revoked_certificate_does_not_connect(stage: Stage) -> None:
    address = make_device(stage.deployment, stage.folder / "revoked", "revoked", registered=False)

    def connects() -> bool:
        with Client(address, "again") as client:
            return client.connected

    assert connects()
    assert address.cert_file is not None
    serial = x509.load_pem_x509_certificate(address.cert_file.read_bytes()).serial_number
    with stage.deployment.change() as rows:
        rows.revocations.revoke_serials("revoked", [f"{serial:x}"])
    wait_until(lambda: not connects(), "it is not revoked")


# --- holders of a token -------------------------------------------------------------------------------


def make_join(token: Token, request: bytes | None = None) -> JoinRequest:
    return JoinRequest(secrets.token_bytes(16), token.device, make_request()[1] if request is None else request)


def make_rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    return request.public_bytes(Encoding.DER)


def find_listener(stage: Stage, user: str | None, password: str | None) -> Address:
    """Return the address of the listener for tokens."""
    deployment = stage.deployment
    return Address(deployment.address.host, deployment.settings.enrolment_port, user, password, tls=True)


def ask(stage: Stage, token: Token, sealed: Sequence[bytes]) -> list[AnyEnrolment]:
    """Send these requests to the listener for tokens; returns all answers up to that of the last, valid request."""
    address, clients = find_listener(stage, token.id, token.login), list[Client]()
    last = unseal(sealed[-1], token.secret, FROM_DEVICE)
    assert isinstance(last, JoinRequest)

    def connect() -> bool:
        """Connect again until the broker knows the token."""
        clients.append(Client(address, f"join-{secrets.token_hex(4)}", [HOME.enrolment_reply(token.id)]))
        return clients[-1].connected

    def list_answers() -> list[AnyEnrolment]:
        return [unseal(raw, token.secret, FROM_COORDINATOR) for _, raw in clients[-1].seen]

    try:
        wait_until(connect, "no connection to the listener for tokens")
        for request in sealed:
            clients[-1].publish(HOME.enrolment(token.id), request)
        wait_until(lambda: any(getattr(each, "nonce", None) == last.nonce for each in list_answers()), "no answer")
        return list_answers()
    finally:
        for client in clients:
            client.close()


def test_requests_that_are_not_valid_get_no_answer(stage: Stage) -> None:
    """A valid request follows: its certificate has the name that the coordinator chose, and it is issued once."""
    token, other = (make_token(stage.deployment, name, 600.0, replaces=True) for name in ("pi-3", "pi-4"))
    valid = make_join(token, make_request(name=COORDINATOR)[1])
    sealed = seal(make_join(token), token.secret, FROM_DEVICE)
    invalid = {
        "another token's secret": seal(make_join(token), other.secret, FROM_DEVICE),
        "sealed as an answer of the coordinator": seal(make_join(token), token.secret, FROM_COORDINATOR),
        "a damaged seal": sealed[:-1] + bytes([sealed[-1] ^ 1]),
        "an answer": seal(
            JoinGranted(valid.nonce, "pi-3", b"", stage.deployment.authority.der), token.secret, FROM_DEVICE
        ),
        "nonsense": seal(make_join(token, b"nonsense"), token.secret, FROM_DEVICE),
        "an RSA key": seal(make_join(token, make_rsa_request()), token.secret, FROM_DEVICE),
    }
    request = seal(valid, token.secret, FROM_DEVICE)
    [granted] = ask(stage, token, [*invalid.values(), request])
    assert isinstance(granted, JoinGranted)
    subject = x509.load_der_x509_certificate(granted.certificate).subject
    assert subject == x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pi-3")])
    assert ask(stage, token, [request])[-1] == granted
    again = ask(stage, token, [seal(make_join(token), token.secret, FROM_DEVICE)])[-1]
    assert isinstance(again, JoinRefused), "the token is used, and the key is another"


@pytest.mark.parametrize("act", ["another device's", "expired", "withdrawn"])
def test_token_that_is_not_valid_is_refused(stage: Stage, act: str) -> None:
    token = make_token(stage.deployment, "pi-5", -1.0 if act == "expired" else 600.0, replaces=True)
    request = make_join(token)
    if act == "another device's":
        request = msgspec.structs.replace(request, device="pi-6")
    if act == "withdrawn":
        with stage.deployment.change() as rows:
            rows.tokens.withdraw(token.device)
    assert isinstance(ask(stage, token, [seal(request, token.secret, FROM_DEVICE)])[-1], JoinRefused)


def test_guessed_token_does_not_connect(stage: Stage) -> None:
    token, other = (make_token(stage.deployment, name, 600.0, replaces=True) for name in ("pi-7", "pi-8"))
    wait_until(lambda: Client(find_listener(stage, token.id, token.login), "early").connected, "no reload")
    guesses = {
        "a guessed secret": (other.id, secrets.token_hex(32)),
        "another's password": (other.id, token.login),
        "a token that never was": (secrets.token_hex(8), secrets.token_hex(32)),
        "a device's name": (ATTACKER, ""),
        "no user": (None, None),
    }
    for act, (user, password) in guesses.items():
        with Client(find_listener(stage, user, password), "guesser") as client:
            assert client.outcome
        assert not client.has_connected, act
