"""Deployments: their files, joining by token, replacement, renewal and revocation, at a real mosquitto."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import click
import msgspec
import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID

from coordinator.cli import cli
from coordinator.config import BrokerConfig, RobustConfig
from coordinator.record.record import open_record
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.service.broker import broker_endpoint
from coordinator.security.authority import DAY_S, Authority
from coordinator.security.broker.mosquitto import memory_limit_bytes
from coordinator.security.broker.process import Broker
from coordinator.security.broker_log import MOST_CONNECTIONS
from coordinator.security.folder import COORDINATOR, Deployment, make_token, own_hosts
from coordinator.security.registry import Certificate, JoinedDevice, OpenToken
from coordinator.security.service import Service, served
from edge_client.cli import cli as edge_cli
from edge_client.health.broker_checks import check_broker
from edge_client.health.clocks import explain_refusal
from edge_client.health.doctor_context import DoctorContext, Finding
from edge_client.health.keys import check_identity
from edge_client.link import identity as identity_module
from edge_client.link import join as join_module
from edge_client.link.endpoint import Endpoint, find_endpoint
from edge_client.link.identity import Identity, Membership, Renewal
from edge_client.link.join import join
from fedvit.errors import BadPayload, ConfigError, LinkDown, PeerRefused
from fedvit.files import atomic_write
from fedvit.transport.address import Address, tls_context
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.enrolment import FROM_DEVICE, JoinRequest, RenewRequest, Token, encode_enrolment, seal
from fedvit.wire.topics import Topics
from tests.support.codes import has_code
from tests.support.deployments import (
    change_beginning,
    make_deployment,
    make_device,
    make_request,
    run_broker,
    serve_deployment,
)
from tests.support.mqtt_client import Client, make_context
from tests.support.waiting import WAIT_S, wait_until

HOME = Topics("home")


class Stage(NamedTuple):
    deployment: Deployment
    service: Service
    said: list[str]

    @property
    def broker(self) -> Broker:
        assert self.service.broker is not None
        return self.service.broker


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A deployment that is being served, as by `coordinator start`."""
    said: list[str] = []
    deployment = make_deployment(tmp_path_factory.mktemp("served") / "deployment")
    with serve_deployment(deployment, said.append) as service:
        yield Stage(deployment, service, said)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_module, "AGAIN_S", 0.2)
    monkeypatch.setattr(identity_module, "REQUEST_INTERVAL_S", 0.5)


def known(deployment: Deployment, name: str) -> JoinedDevice | None:
    with deployment.registry.read() as rows:
        return rows.find_device(name)


def joined(deployment: Deployment, name: str) -> JoinedDevice:
    device = known(deployment, name)
    assert device is not None
    return device


def open_tokens(deployment: Deployment, name: str) -> list[OpenToken]:
    with deployment.registry.read() as rows:
        return rows.tokens.read_open(time.time(), name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


# --- the folder ---------------------------------------------------------------------------------------


def test_what_is_secret_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "made")
    make_token(deployment, "pi", 60.0)
    for path in (deployment.folder, deployment.run):
        assert path.stat().st_mode & 0o777 == 0o700
    secret = {"authority.key", "server.key", "coordinator.key", "registry.db", "enrolment.passwords"}
    for path in deployment.folder.iterdir():
        text = path.read_bytes() if path.is_file() else b""
        assert (b"PRIVATE KEY" in text) == path.name.endswith(".key")
        if path.name in secret:
            assert path.stat().st_mode & 0o777 == 0o600, path
            secret.discard(path.name)
    assert not secret
    beside = [path for path in deployment.folder.glob("registry.db*") if path.stat().st_mode & 0o777 == 0o600]
    assert len(beside) == len([*deployment.folder.glob("registry.db*")]) == 3  # SQLite's journals
    deployment.folder.chmod(0o755)
    with pytest.raises(ConfigError, check=has_code("FV1312")):
        Deployment.open(deployment.folder)
    deployment.folder.chmod(0o700)
    (deployment.folder / "authority.key").chmod(0o640)
    with pytest.raises(ConfigError, check=has_code("FV1312")):
        Deployment.open(deployment.folder)


def test_settings_that_are_no_text_are_named(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "made")
    (deployment.folder / "deployment.json").write_bytes(b'{"federation": "\xff"}')
    with pytest.raises(ConfigError, check=has_code("FV1310")):
        Deployment.open(deployment.folder)


def test_token_works_after_a_full_disk_cut_the_line_of_another(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "made")
    make_token(deployment, "pi-1", 60.0)
    logins = deployment.folder / "enrolment.passwords"
    whole = logins.read_text()
    with logins.open("a") as file:
        file.write("0123456789abcdef:$7$2000$half")
    token = make_token(deployment, "pi-2", 60.0)
    assert logins.read_text().startswith(f"{whole}{token.id}:$7$")
    make_token(deployment, "pi-3", 60.0)
    assert [len(line) for line in logins.read_text().splitlines()] == 3 * [len(whole) - 1]
    logins.unlink()
    make_token(deployment, "pi-4", 60.0)
    assert len(logins.read_text().splitlines()) == 4, "a missing file is made anew"


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = str(tmp_path / "made")
    assert run("init", folder, "--port", "0", "--enrolment-port", "0").exit_code == 0

    def read_files() -> dict[Path, bytes]:
        # SQLite writes and removes files beside its own
        files = [path for path in Path(folder).iterdir() if path.is_file() and not path.name.endswith(("-wal", "-shm"))]
        return {path: path.read_bytes() for path in files}

    before = read_files()
    again = run("init", folder)
    assert isinstance(again.exception, ConfigError)
    assert "exists already" in str(again.exception)
    assert read_files() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    assert isinstance(run("init", str(tmp_path / "other")).exception, ConfigError)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


def test_broker_configuration_has_limits(tmp_path: Path) -> None:
    lines = make_deployment(tmp_path / "made").configuration.read_text().splitlines()
    for line in (
        "require_certificate true", "use_identity_as_username true", "tls_version tlsv1.3", "max_packet_size 262144",
        "max_queued_messages 4096", "max_queued_bytes 67108864", "max_inflight_messages 64",
        "retain_available false", "persistent_client_expiration 1h", "max_qos 1",
        f"memory_limit {memory_limit_bytes()}",
    ):  # fmt: skip
        assert line in lines
    assert "allow_anonymous true" not in lines


@pytest.mark.parametrize("host", ["a b", "mqtts://pi", "pi:8883", "", "pi..local", "müller"])
def test_hosts_that_can_be_in_no_certificate(tmp_path: Path, host: str) -> None:
    failed = run("init", str(tmp_path / "made"), "--host", host)
    assert isinstance(failed.exception, ConfigError)
    assert "must be a name or an address" in str(failed.exception)
    assert not (tmp_path / "made").exists()


def test_first_host_of_the_operator_is_first_in_certificate() -> None:
    hosts = own_hosts(["pi.lan", "10.0.0.7", "fd00::1"], "0.0.0.0", ["192.168.1.2"])
    assert hosts[:4] == ("pi.lan", "10.0.0.7", "fd00::1", "192.168.1.2")
    assert {"localhost", "127.0.0.1", "::1"} <= set(hosts)
    certificate = x509.load_pem_x509_certificate(
        Authority.create("test", time.time()).server(hosts, time.time()).certificate
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(getattr(name, "value", name)) for name in names} == set(hosts)


def test_no_deployment(tmp_path: Path) -> None:
    for command in (["devices"], ["revoke", "pi"], ["enroll", "pi"]):
        failed = run(*command, "--deployment", str(tmp_path))
        assert isinstance(failed.exception, ConfigError)
        assert "coordinator init" in str(failed.exception)


@pytest.mark.parametrize("name", ["pi.1", "", "a/b", "+", COORDINATOR, "x" * 65, "-rf", ".."])
def test_names_that_cannot_be_topics_are_refused(stage: Stage, name: str) -> None:
    with pytest.raises(ConfigError):
        make_token(stage.deployment, name, 60.0)


def test_no_device_is_enrolled_whose_name_is_an_option_of_a_command(stage: Stage) -> None:
    failed = run("enroll", "--no-wait", "--deployment", str(stage.deployment.folder), "--", "-rf")
    assert isinstance(failed.exception, ConfigError)
    assert str(failed.exception).startswith("device name '-rf' must be 1 to 64 letters, digits, '-' or '_'")
    assert not open_tokens(stage.deployment, "-rf")


# --- certificates -------------------------------------------------------------------------------------


def test_only_the_key_of_a_request_is_used() -> None:
    """A device that asks to be the coordinator, an authority, or a server is what its token says."""
    authority = Authority.create("test", time.time())
    key = ec.generate_private_key(ec.SECP256R1())
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COORDINATOR)]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=3), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, SHA256())
    )
    made = authority.device("pi-1", greedy.public_bytes(Encoding.DER), time.time())
    assert made.subject.rfc4514_string() == "CN=pi-1"
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [entry._name for entry in usage] == ["clientAuth"]
    with pytest.raises(x509.ExtensionNotFound):
        made.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert made.not_valid_before_utc.timestamp() < time.time() - DAY_S
    ahead = authority.device("pi-1", make_request()[1], time.time() + 65 * DAY_S)
    assert ahead.not_valid_before_utc == made.not_valid_before_utc == authority.certificate.not_valid_before_utc
    lasts_s = made.not_valid_after_utc.timestamp() - time.time()
    assert 89 * DAY_S < lasts_s <= 90 * DAY_S


def test_requests_that_are_none() -> None:
    authority = Authority.create("test", time.time())
    _, good = make_request()
    other = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    strong = other.sign(rsa.generate_private_key(65537, 2048), SHA256()).public_bytes(Encoding.DER)
    wrong_curve = other.sign(ec.generate_private_key(ec.SECP384R1()), SHA256()).public_bytes(Encoding.DER)
    forged = good[:-4] + bytes(4)
    for request in (b"", b"junk", good[:-1], forged, strong, wrong_curve, good * 40):
        with pytest.raises(BadPayload):
            authority.device("pi-1", request, time.time())


# --- joining ------------------------------------------------------------------------------------------


def test_a_device_joins_and_its_key_stays_at_home(stage: Stage, tmp_path: Path) -> None:
    token = make_token(stage.deployment, "pi-join", 60.0)
    assert Token.parse(token.text()) == token
    joined = join(token, tmp_path / "identity")
    assert joined.trouble is None
    assert joined.identity.membership == Membership(
        device="pi-join", federation="home", host="127.0.0.1", port=stage.deployment.settings.port, token=token.id
    )
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "identity").iterdir())
    assert not [path for path in (tmp_path / "identity").iterdir() if path.name.startswith("joining")]
    key = joined.identity.key.read_bytes()
    assert b"PRIVATE KEY" in key
    assert key not in b"".join(path.read_bytes() for path in stage.deployment.folder.iterdir() if path.is_file())
    with pytest.raises(ConfigError, check=has_code("FV1306")):
        join(make_token(stage.deployment, "pi-other", 60.0), tmp_path / "identity")
    listed = json.loads(run("devices", "--deployment", str(stage.deployment.folder), "--json").stdout)
    [entry] = [entry for entry in listed if entry["device"] == "pi-join"]
    assert entry["state"] == "valid"


def test_interrupted_end_of_joining(stage: Stage, tmp_path: Path) -> None:
    """A board that lost its power before its token was removed joins with it again: it keeps its certificate."""
    token, folder = make_token(stage.deployment, "pi-cut", 60.0), tmp_path / "identity"
    certificate = join(token, folder).identity.certificate.read_bytes()
    (folder / f"joining-{token.id}.key").write_text("left over")
    again = join(token, folder)
    assert again.trouble is None
    assert again.identity.certificate.read_bytes() == certificate
    assert not list(folder.glob("joining-*"))


def test_join_as_root_leaves_files_readable_by_the_service(stage: Stage, tmp_path: Path) -> None:
    """The state belongs to the service's user once it has run; only root can give anything to somebody else."""
    state = tmp_path / "state"
    state.mkdir()
    user = 61946 if os.geteuid() == 0 else os.geteuid()
    os.chown(state, user, -1)
    for replaces in (False, True):
        token = make_token(stage.deployment, "pi-served", 60.0, replaces=replaces)
        folder = join(token, state / "identity", replace=replaces).identity.folder
        assert {path.stat().st_uid for path in (folder, *folder.iterdir())} == {user}
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_token_works_once(stage: Stage, tmp_path: Path) -> None:
    token = make_token(stage.deployment, "pi-once", 60.0)
    join(token, tmp_path / "first")
    with pytest.raises(PeerRefused, check=has_code("FV1308")):
        join(token, tmp_path / "second")
    assert Identity.find(tmp_path / "second") is None


def test_a_join_whose_answer_got_lost_is_taken_up(stage: Stage, tmp_path: Path) -> None:
    """The device was switched off when the coordinator had signed: with the same key it gets the same certificate."""
    token = make_token(stage.deployment, "pi-lost", 60.0)
    request = join_module._request(tmp_path / "identity", token)
    question = seal(JoinRequest(b"0" * 16, token.device, request), token.secret, FROM_DEVICE)
    with Client(stage.deployment.address, "instead") as client:
        client.publish(HOME.enrolment(token.id), question)
    wait_until(lambda: known(stage.deployment, "pi-lost"), "the certificate")
    assert join(token, tmp_path / "identity").trouble is None
    assert len(joined(stage.deployment, "pi-lost").certificates) == 1


def test_tokens_that_are_worth_nothing(stage: Stage, tmp_path: Path) -> None:
    """Expired, withdrawn, of another deployment: each in words for who stands at the device."""
    deployment, folder = stage.deployment, tmp_path / "identity"
    with pytest.raises(PeerRefused, check=has_code("FV1308")):
        join(make_token(deployment, "pi-late", -1.0), folder)
    withdrawn = make_token(deployment, "pi-withdrawn", 60.0)
    assert run("revoke", "pi-withdrawn", "--deployment", str(deployment.folder)).exit_code == 0
    with pytest.raises(PeerRefused, check=has_code("FV1308")):
        join(withdrawn, folder)
    elsewhere = make_deployment(tmp_path / "elsewhere")
    ports = {"port": deployment.settings.port, "enrolment_port": deployment.settings.enrolment_port}
    with pytest.raises(PeerRefused, check=has_code("FV1304")):
        join(msgspec.structs.replace(make_token(elsewhere, "pi-foreign", 60.0), **ports), folder)
    assert Identity.find(folder) is None


def test_a_token_for_a_name_that_is_taken(stage: Stage, tmp_path: Path) -> None:
    """Of two tokens for one name the second is withdrawn when a device joins with the first. No third is given out."""
    tokens = [make_token(stage.deployment, "pi-twice", 60.0) for _ in range(2)]
    join(tokens[0], tmp_path / "first")
    assert not open_tokens(stage.deployment, "pi-twice")
    with pytest.raises(PeerRefused, check=has_code("FV1308")):
        join(tokens[1], tmp_path / "second")
    with pytest.raises(ConfigError, check=has_code("FV1306", "--replace")):
        make_token(stage.deployment, "pi-twice", 60.0)


def test_a_new_device_takes_the_place_of_an_old_one(stage: Stage, tmp_path: Path) -> None:
    """The old one's open connection ends, and it does not come in again."""
    first = join(make_token(stage.deployment, "pi-card", 60.0), tmp_path / "first").identity
    with Client(first.address(), "old card") as old:
        token = make_token(stage.deployment, "pi-card", 60.0, replaces=True)
        assert Client(first.address(), "until then").connected
        second = join(token, tmp_path / "second")
        wait_until(lambda: not old.connected, "the end of the old card's connection")

    def comes_in() -> bool:
        with Client(second.identity.address(), "new card") as new:
            return new.connected

    wait_until(comes_in, "the new card to come in, as soon as the broker has begun anew")
    assert not Client(first.address(), "old card").connected
    join(make_token(stage.deployment, "pi-next", 60.0), tmp_path / "next")  # enrolment comes back to the broker, too


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-3], "copied|wrong character"),
        (lambda text: text[:40] + ("A" if text[40] != "A" else "B") + text[41:], "copied|wrong character"),
        (lambda text: text[3:], "begins with"),
        (lambda text: "", "begins with"),
        (lambda text: text + "é", "copied|wrong character"),
    ],
)
def test_a_token_that_was_copied_wrongly(stage: Stage, change: Callable[[str], str], words: str) -> None:
    text = make_token(stage.deployment, "pi-typo", 60.0).text()
    assert Token.parse(f"  {text[:30]}\n{text[30:]} ").device == "pi-typo"  # a terminal broke the line
    with pytest.raises(ConfigError, match=words):
        Token.parse(change(text))


def test_strangers_ask_to_be_enrolled(stage: Stage) -> None:
    """Junk, requests under another secret, replies instead of requests: no answer, no certificate, and it goes on."""
    token = make_token(stage.deployment, "pi-stranger", 60.0)
    _, request = make_request()
    message = JoinRequest(b"0" * 16, token.device, request)
    sealed = seal(message, token.secret, FROM_DEVICE)
    junk = [
        b"", b"\x01", b"\x02" + sealed[1:], bytes(100), bytes(20_000), seal(message, bytes(16), FROM_DEVICE),
        seal(message, token.secret, b"another direction"), sealed[:-1], sealed[:40] + b"\xff" + sealed[41:],
    ]  # fmt: skip
    with Client(stage.deployment.address, "stranger", [HOME.enrolment_reply(token.id)]) as client:
        for payload in junk:
            client.publish(HOME.enrolment(token.id), payload)
            client.publish(HOME.enrolment("0" * 16), payload)
            client.publish(HOME.renewal("nobody"), payload)
        wrong = seal(JoinRequest(b"1" * 16, "pi-1", request), token.secret, FROM_DEVICE)
        client.publish(HOME.enrolment(token.id), wrong)
        wait_until(lambda: client.seen, "an answer to the one that is sealed, for a name that is not the token's")
        assert known(stage.deployment, "pi-stranger") is None
        client.publish(HOME.enrolment(token.id), sealed)
        wait_until(lambda: len(client.seen) == 2, "the certificate")
    assert known(stage.deployment, "pi-stranger")


def test_a_broker_that_only_pretends(tmp_path: Path) -> None:
    """It lets the device in, reads its request, and answers as well as it can without the token's secret."""
    theirs = make_deployment(tmp_path / "theirs")
    ours = make_deployment(tmp_path / "ours")
    token = make_token(ours, "pi-1", 60.0)
    with theirs.change() as rows:  # the broker knows what the device shows it: the login, not the secret
        rows.tokens.add(open_tokens(ours, "pi-1")[0])
    ports = {"port": theirs.settings.port, "enrolment_port": theirs.settings.enrolment_port}
    with run_broker(theirs), Client(theirs.address, "impostor", [HOME.enrolment(token.id)]) as impostor:
        ended = threading.Event()

        def pretend() -> None:
            while not ended.wait(0.02):
                for _, payload in impostor.seen[-1:]:
                    impostor.publish(HOME.enrolment_reply(token.id), payload)  # the device's own words
                    impostor.publish(HOME.enrolment_reply(token.id), seal(JoinRequest(b"", "", b""), bytes(16), b"x"))

        thread = threading.Thread(target=pretend)
        thread.start()
        try:
            with pytest.raises(LinkDown, check=has_code("FV1305")):
                join(msgspec.structs.replace(token, **ports), tmp_path / "identity", patience_s=2.0)
        finally:
            ended.set()
            thread.join()
    assert impostor.seen
    assert Identity.find(tmp_path / "identity") is None


def test_a_genuine_answer_for_another_authority_is_not_used(stage: Stage, tmp_path: Path) -> None:
    token = msgspec.structs.replace(make_token(stage.deployment, "pi-pinned", 60.0), authority=bytes(32))
    with pytest.raises(PeerRefused, check=has_code("FV1307")):
        join(token, tmp_path / "identity")
    assert Identity.find(tmp_path / "identity") is None


def test_join_without_broker_fails(tmp_path: Path) -> None:
    token = make_token(make_deployment(tmp_path / "made"), "pi-1", 60.0)
    with pytest.raises(LinkDown, check=has_code("FV1305")):
        join(token, tmp_path / "identity", patience_s=0.5)


def test_join_goes_on_once_the_broker_can_be_reached(tmp_path: Path) -> None:
    """A board boots before its network or its coordinator is there; meanwhile it says why, in one line."""
    said: list[str] = []
    deployment = make_deployment(tmp_path / "made")
    token = make_token(deployment, "pi-1", 600.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, token, tmp_path / "identity", patience_s=WAIT_S, report=said.append)
        wait_until(lambda: any("trying again" in line for line in said), "what it waits for")
        with serve_deployment(deployment):
            assert joining.result(WAIT_S).trouble is None
    assert len([line for line in said if "connection refused" in line]) == 1


# --- renewal ------------------------------------------------------------------------------------------


def identity_of(deployment: Deployment, folder: Path, name: str, *, age_days: float) -> Identity:
    """A device that joined so long ago."""
    address = make_device(deployment, folder / "keys", name, issued_s=time.time() - age_days * DAY_S)
    identity = folder / "identity"
    assert address.cert_file is not None
    assert address.key_file is not None
    for file, kept in ((address.cert_file, "certificate.pem"), (address.key_file, "key.pem")):
        atomic_write(identity / kept, file.read_bytes(), private=True)
    atomic_write(identity / "authority.pem", deployment.authority.pem)
    key = load_pem_private_key(address.key_file.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    atomic_write(identity / "request.der", make_request(key)[1])
    membership = {"device": name, "federation": "home", "host": "127.0.0.1", "port": deployment.settings.port}
    (identity / "membership.json").write_text(json.dumps(membership))
    return Identity(identity)


def ask(identity: Identity, *, until: Callable[[], bool]) -> None:
    """What the agent does with its renewal."""
    inbox: SimpleQueue[object] = SimpleQueue()
    renewal = Renewal(identity, HOME)
    transport = MqttTransport(inbox, identity.address(), client_id="renewing")
    transport.subscribe(renewal.answers, 1)
    transport.open()
    try:
        deadline = time.monotonic() + 20
        while not until() and time.monotonic() < deadline:
            try:
                event = inbox.get(timeout=0.1)
            except Empty:
                renewal.tick(transport)
                continue
            if isinstance(event, Connected):
                renewal.note_connected(transport, event.certificate)
            elif isinstance(event, Received):
                renewal.on_answer(event.payload)
    finally:
        transport.close()


def test_a_certificate_is_renewed_in_its_last_third(stage: Stage, tmp_path: Path) -> None:
    """Of 90 days 61 are over: 29 are left, less than 30. The new one is used from the next connection on, and replaces
    the former one when the broker has accepted it."""
    identity = identity_of(stage.deployment, tmp_path, "pi-old", age_days=61.0)
    before = identity.certificate.read_bytes()
    ask(identity, until=identity.next_certificate.is_file)
    assert identity.certificate.read_bytes() == before
    ask(identity, until=lambda: not identity.next_certificate.is_file())
    renewed = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
    assert renewed.not_valid_after_utc.timestamp() > time.time() + 89 * DAY_S
    assert renewed.subject.rfc4514_string() == "CN=pi-old"
    assert Client(identity.address(), "renewed").connected
    assert len(joined(stage.deployment, "pi-old").certificates) == 2
    wait_until(lambda: joined(stage.deployment, "pi-old").last_seen, "when it was seen")
    run("revoke", "pi-old", "--deployment", str(stage.deployment.folder))
    wait_until(lambda: not Client(identity.address(), "later").connected, "the end of all its certificates")


def test_a_certificate_is_not_renewed_earlier(stage: Stage, tmp_path: Path) -> None:
    """Of 90 days 59 are over: 31 are left. The next answer comes, so this question is behind it."""
    young = identity_of(stage.deployment, tmp_path / "young", "pi-young", age_days=59.0)
    old = identity_of(stage.deployment, tmp_path / "old", "pi-older", age_days=80.0)
    before = young.certificate.read_bytes()
    with Client(young.address(), "asking", [HOME.certificate_for("pi-young")]) as request:
        request.publish(HOME.renewal("pi-young"), encode_enrolment(RenewRequest(young.request)))
        ask(old, until=old.next_certificate.is_file)
    assert not request.seen
    assert young.certificate.read_bytes() == before


def test_a_certificate_for_another_key_is_not_taken(stage: Stage, tmp_path: Path) -> None:
    identity = identity_of(stage.deployment, tmp_path, "pi-key", age_days=0.0)
    before = identity.certificate.read_bytes()
    other = stage.deployment.authority.device("pi-key", make_request()[1], time.time())
    with pytest.raises(BadPayload, check=has_code("FV2311")):
        identity.keep_next_certificate(other.public_bytes(Encoding.DER))
    assert identity.certificate.read_bytes() == before
    assert not list(identity.folder.glob("*-certificate.pem"))


def test_a_clock_that_jumped_issues_nothing_until_it_is_confirmed(stage: Stage, tmp_path: Path) -> None:
    """The reference date is moved instead of the clock, under the running service."""
    identity = identity_of(stage.deployment, tmp_path / "old", "pi-jump", age_days=61.0)
    token = make_token(stage.deployment, "pi-late", 60.0)
    with stage.deployment.change() as rows:
        rows.set_clock(time.time() - 65 * DAY_S)
    wait_until(lambda: any("65 days ahead of" in line for line in stage.said), "the warning")
    with pytest.raises(PeerRefused, check=has_code("FV1308", "--confirm-clock")):
        join(token, tmp_path / "identity")
    seen = joined(stage.deployment, "pi-jump").last_seen
    ask(identity, until=lambda: joined(stage.deployment, "pi-jump").last_seen != seen)
    assert not identity.next_certificate.exists()
    shown = run("devices", "--deployment", str(stage.deployment.folder))
    assert "machine's clock" in shown.stdout
    assert "65 days ahead of" in shown.stderr
    listed = json.loads(run("devices", "--deployment", str(stage.deployment.folder), "--json").stdout)
    assert all("65 days ahead of" in entry["clock_in_doubt"] for entry in listed)
    confirmed = run("devices", "--deployment", str(stage.deployment.folder), "--confirm-clock", "--json")
    assert {entry["clock_in_doubt"] for entry in json.loads(confirmed.stdout)} == {None}
    wait_until(lambda: any("plausible again" in line for line in stage.said), "the end of the warning")
    ask(identity, until=identity.next_certificate.is_file)
    assert join(token, tmp_path / "identity").trouble is None


def test_devices_shows_certificates_that_the_clock_does_not_find_valid(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    for name, days in (("ends", 1.0), ("lasts", 90.0)):
        make_device(deployment, tmp_path / "keys", name, issued_s=time.time() - 2 * DAY_S, days=days)
    later = Authority.create("later", time.time() + 10 * DAY_S)
    listed = ["devices", "--deployment", str(deployment.folder), "--json"]
    states = {entry["device"]: entry["state"] for entry in json.loads(run(*listed).stdout)}
    assert states == {"ends": "expired", "lasts": "valid"}
    for file, content in (("authority.pem", later.pem), ("authority.key", later.key_pem)):
        atomic_write(deployment.folder / file, content, private=True)
    states = {entry["device"]: entry["state"] for entry in json.loads(run(*listed).stdout)}
    assert states == {"ends": "expired", "lasts": "not yet valid"}


def next_of(stage: Stage, identity: Identity, *, begin_s: float | None = None) -> bytes:
    """Another certificate for a device, DER, that the registry does not list."""
    authority = stage.deployment.authority
    made = authority.device(identity.membership.device, identity.request, time.time())
    if begin_s is not None:
        made = change_beginning(authority, made, begin_s)
    return made.public_bytes(Encoding.DER)


def test_a_device_falls_back_to_its_former_certificate_until_the_next_one_is_accepted(
    stage: Stage, tmp_path: Path
) -> None:
    """The broker refuses a certificate of the future; nobody but the device can get it out of that."""
    identity = identity_of(stage.deployment, tmp_path, "pi-ahead", age_days=0.0)
    before = identity.certificate.read_bytes()
    identity.keep_next_certificate(next_of(stage, identity, begin_s=time.time() + 30 * DAY_S))
    refused = identity.next_certificate.read_bytes()
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, identity.address(), client_id="falling-back")
    transport.open()
    try:
        assert inbox.get(timeout=WAIT_S) == Connected(identity.certificate)  # no loss is reported before
    finally:
        transport.close()
    Renewal(identity, HOME).note_connected(transport, identity.certificate)
    assert (identity.certificate.read_bytes(), identity.next_certificate.read_bytes()) == (before, refused)
    identity.next_certificate.write_text("damaged")
    ask(identity, until=lambda: joined(stage.deployment, "pi-ahead").last_seen is not None)
    identity.keep_next_certificate(next_of(stage, identity))
    accepted = identity.next_certificate.read_bytes()
    ask(identity, until=lambda: not identity.next_certificate.is_file())
    assert identity.certificate.read_bytes() == accepted


_RENEWING = """
import sys
from pathlib import Path
from edge_client.link.identity import Identity
identity, *renewed = Identity(Path(sys.argv[1])), *map(bytes.fromhex, sys.argv[2:])
while True:
    for der in renewed:
        identity.keep_next_certificate(der)
        print(flush=True)
        identity.use_next_certificate()
"""


@pytest.mark.slow
def test_a_device_that_is_killed_while_it_renews_keeps_a_valid_certificate(stage: Stage, tmp_path: Path) -> None:
    identity = identity_of(stage.deployment, tmp_path, "pi-killed", age_days=0.0)
    renewed = [next_of(stage, identity) for _ in range(2)]
    command = [sys.executable, "-c", _RENEWING, str(identity.folder), *(der.hex() for der in renewed)]
    whole = {identity.certificate.read_text(), *map(ssl.DER_cert_to_PEM_cert, renewed)}
    for renewals in range(1, 9):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as device:
            assert device.stdout is not None
            for _ in range(renewals):
                assert device.stdout.readline()
            device.kill()
        assert identity.certificate.read_text() in whole
        tls_context(identity.address())
        if identity.next_certificate.exists():
            assert identity.next_certificate.read_text() in whole
    assert Client(identity.address(), "survivor").connected


# --- revocation ---------------------------------------------------------------------------------------


def test_revoke_ends_all_connections_of_one_device_and_of_no_other(stage: Stage, tmp_path: Path) -> None:
    """As soon as the command has ended. It is still shut out when the broker has been started again."""
    lost = join(make_token(stage.deployment, "pi-gone", 60.0), tmp_path / "gone").identity
    kept = join(make_token(stage.deployment, "pi-kept", 60.0), tmp_path / "kept").identity
    pid = stage.broker.pid
    ids = ("gone", "", "pi-kept-2", "gone disconnected", "x (p2, c1, k60, u'pi-kept').", "Ünï çödé [no")
    with contextlib.ExitStack() as open_now:
        other = open_now.enter_context(Client(kept.address(), "kept", [HOME.to_device("pi-kept")]))
        gone = [open_now.enter_context(Client(lost.address(), client_id)) for client_id in ids]
        with Client(lost.address(), "gone disconnected"):  # the broker closes the older one of that id
            done = run("revoke", "pi-gone", "--deployment", str(stage.deployment.folder))
            assert done.exit_code == 0, done.exception
            assert not Client(lost.address(), "gone again").connected
            wait_until(lambda: not any(client.connected for client in gone), "the end of its connections")
        with Client(stage.deployment.address, "coordinator") as coordinator:
            coordinator.publish(HOME.to_device("pi-kept"), b"still here")
        wait_until(lambda: other.seen, "a message for the other device")
        assert other.outcome == ["Success"]
    assert stage.broker.pid == pid
    told = [stage.service.revoked.get(timeout=5) for _ in range(stage.service.revoked.qsize())]
    assert told.count("pi-gone") == 1
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stage.broker.pid != pid and stage.broker.up, "the broker")
    assert not Client(lost.address(), "after a restart").connected
    assert Client(kept.address(), "after a restart").connected
    unknown = run("revoke", "pi-unknown", "--deployment", str(stage.deployment.folder))
    assert "no device is called 'pi-unknown'" in str(unknown.exception)


def test_replace_ends_a_connection_that_was_accepted_before_and_is_used_after(stage: Stage, tmp_path: Path) -> None:
    """Its certificate was valid when it was looked at, and its name is valid afterwards: it is the new card's, too."""
    old_card = join(make_token(stage.deployment, "pi-held", 60.0), tmp_path / "first").identity.address()
    pid = stage.broker.pid
    with (
        socket.create_connection((old_card.host, old_card.port), 30) as plain,
        make_context(old_card).wrap_socket(plain, server_hostname=old_card.host) as held,
    ):
        assert Client(stage.deployment.address, "barrier").connected  # by now the handshake is over
        token = make_token(stage.deployment, "pi-held", 60.0, replaces=True)
        new_card = join(token, tmp_path / "second").identity.address()
        wait_until(lambda: not Client(old_card, "old card").connected, "the replacement")
        with Client(new_card, "new card", [HOME.to_device("pi-held")]) as new:
            held.sendall(b"\x10\x10\0\x04MQTT\x04\x02\0\x3c\0\x04held")
            while held.recv(100):  # it is let in, which the log tells, and ended
                pass
            with Client(stage.deployment.address, "coordinator") as coordinator:
                coordinator.publish(HOME.to_device("pi-held"), b"for the new card")
            wait_until(lambda: new.seen, "a message for the new card")
            assert new.outcome == ["Success"]
    assert stage.broker.pid == pid


def test_revoke_restarts_the_broker_where_a_client_id_hides_its_device(stage: Stage, tmp_path: Path) -> None:
    """mosquitto cuts the lines of its log, before the user where the id is long."""
    hidden = join(make_token(stage.deployment, "pi-hidden", 60.0), tmp_path / "hidden").identity
    pid = stage.broker.pid
    with Client(hidden.address(), "x" * 2000) as client:
        assert client.connected
        assert run("revoke", "pi-hidden", "--deployment", str(stage.deployment.folder)).exit_code == 0
        wait_until(lambda: not client.connected, "the end of its connection")
    assert stage.broker.pid != pid
    wait_until(lambda: "the id of a client hides its device" in "\n".join(stage.said), "what was done")


def test_only_one_process_serves_a_deployment(stage: Stage) -> None:
    with (
        pytest.raises(ConfigError, match=f"is being served by process {os.getpid()}"),
        served(stage.deployment, lambda _: None),
    ):
        pass


def test_a_broker_that_died_comes_back(stage: Stage, tmp_path: Path) -> None:
    pid = stage.broker.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stage.broker.pid != pid and stage.broker.alive(), "the broker")
    assert join(make_token(stage.deployment, "pi-after", 60.0), tmp_path / "identity").trouble is None


def test_a_session_that_stays_is_counted(stage: Stage, tmp_path: Path) -> None:
    """By the name in the certificate, whatever the client calls itself; `coordinator devices` tells."""
    address = make_device(stage.deployment, tmp_path, "pi-hoards")
    make_device(stage.deployment, tmp_path, "pi-framed")
    forged = "x (p2, c0, k60, u'pi-framed')."
    Client(address, forged, persistent=True).close()
    wait_until(lambda: joined(stage.deployment, "pi-hoards").misuses == 1, "the count")
    assert joined(stage.deployment, "pi-framed").misuses == 0
    wait_until(lambda: "pi-hoards keeps a session at the broker" in "\n".join(stage.said), "the operator is told")
    listed = json.loads(run("devices", "--json", "--deployment", str(stage.deployment.folder)).output)
    assert {entry["device"]: entry["misuses"] for entry in listed}["pi-hoards"] == 1
    assert Client(address, "again").connected


@pytest.mark.slow
def test_device_with_too_many_connections_is_revoked(stage: Stage, tmp_path: Path) -> None:
    """Connections are what one device could use up for all others."""
    address = make_device(stage.deployment, tmp_path, "pi-crowds")
    crowd = [Client(address, f"crowd-{number}") for number in range(MOST_CONNECTIONS + 1)]
    try:
        wait_until(lambda: not Client(address, "again").connected, "the revocation")
        wait_until(lambda: not any(client.connected for client in crowd), "the end of its connections")
    finally:
        for client in crowd:
            client.close()
    assert joined(stage.deployment, "pi-crowds").revoked_at is not None
    crowd = f"pi-crowds opened {MOST_CONNECTIONS + 1} connections at once"
    wait_until(lambda: crowd in "\n".join(stage.said), "the operator is told")


def test_external_mosquitto_is_used(tmp_path: Path) -> None:
    """It was started with the deployment's configuration; it is told of revocations, and left running."""
    deployment = make_deployment(tmp_path / "made")
    folder = str(deployment.folder)
    said: list[str] = []
    with run_broker(deployment) as broker:
        with served(deployment, said.append) as service:
            assert service.broker is None
            address = make_device(deployment, tmp_path / "keys", "pi-1")
            assert Client(address, "before").connected
            done: list[Result] = []
            command = threading.Thread(target=lambda: done.append(run("revoke", "pi-1", "--deployment", folder)))
            command.start()
            wait_until(lambda: service.watch() or done, "the command")  # type: ignore[func-returns-value]
            command.join()
            assert done[0].exit_code == 0
            wait_until(lambda: not Client(address, "after").connected, "the revocation")
        assert broker.alive()
    assert any(f"process {broker.pid}, has reloaded" in line for line in said)


# --- at the device ------------------------------------------------------------------------------------


def test_the_doctor_of_a_device_that_has_joined(stage: Stage, tmp_path: Path) -> None:
    """All is well, and then it is revoked: the doctor says what is the matter, and what to do."""
    identity = join(make_token(stage.deployment, "pi-ill", 60.0), tmp_path / "identity").identity
    context = DoctorContext(
        address=identity.address(), topics=HOME, device="pi-ill", state=None, data=None, test_share=0.2
    )
    found = [*check_broker(context)]
    assert [(finding.check, finding.level) for finding in found] == [
        ("broker", "ok"), ("tls", "ok"), ("login", "ok"), ("messages", "ok"),
    ]  # fmt: skip
    assert found[1].what.startswith("TLSv1.3")
    [certificate] = check_identity(replace(context, identity=identity))
    assert (certificate.level, certificate.what[:31]) == ("ok", "the certificate of 'pi-ill' is ")
    assert run("revoke", "pi-ill", "--deployment", str(stage.deployment.folder)).exit_code == 0
    wait_until(stage.broker.alive, "the broker")
    *_, last = check_broker(context)
    assert (last.check, last.level) == ("login", "error")
    assert "revoked" in str(last.hint)
    *_, elsewhere = check_broker(replace(context, address=identity.address("127.0.0.2")))
    assert elsewhere.level == "error"
    foreign = make_deployment(tmp_path / "foreign")
    with run_broker(foreign):
        *_, updated = check_broker(replace(context, address=identity.address(f"127.0.0.1:{foreign.settings.port}")))
    assert (updated.check, updated.level) == ("tls", "error")
    assert "join again with a token of the current deployment" in str(updated.hint)


def test_the_doctor_names_the_clock_that_is_wrong(stage: Stage, tmp_path: Path) -> None:
    """The broker finds the certificate expired; by the device's clock, ten days behind, it is still valid."""
    identity = identity_of(stage.deployment, tmp_path, "pi-behind", age_days=91.0)
    now_s = time.time()
    context = DoctorContext(
        address=identity.address(), topics=HOME, device="pi-behind", state=None, data=None, test_share=0.2,
        identity=identity, root=tmp_path / "root", now_s=now_s - 10 * DAY_S, software_s=now_s,
    )  # fmt: skip

    def login(asked: DoctorContext) -> Finding:
        *_, last = check_broker(asked)
        assert (last.check, last.level) == ("login", "error")
        return last

    assert "expired" in login(context).what
    assert "this device's clock is wrong" in str(login(context).hint)
    younger = replace(context, software_s=0.0)
    atomic_write(identity.authority, Authority.create("older", now_s - 100 * DAY_S).pem)
    assert explain_refusal(younger) is None, "this device does not trust the broker"
    atomic_write(identity.authority, stage.deployment.authority.pem)
    assert "this device's clock is wrong" in str(login(younger).hint), "it is before the deployment"
    later = replace(younger, now_s=now_s - 1.5 * DAY_S)
    assert "compare both dates" in str(login(later).hint)
    (tmp_path / "root" / "run" / "systemd" / "timesync").mkdir(parents=True)
    (tmp_path / "root" / "run" / "systemd" / "timesync" / "synchronized").touch()
    assert "set the server's" in str(login(later).hint)
    right = login(replace(context, now_s=now_s))
    assert "has it expired" in str(right.hint), "both clocks find it expired"


def way(**given: object) -> Endpoint:
    return find_endpoint(
        **{"broker": None, "ca_file": None, "federation": None, "device": None, "state": None, **given}
    )


def test_what_a_device_joined_is_used_without_any_flag(stage: Stage, tmp_path: Path) -> None:
    identity_of(stage.deployment, tmp_path, "pi-flag", age_days=0.0)
    port = stage.deployment.settings.port
    here = way(state=tmp_path)
    assert (here.address.host, here.address.port, here.address.tls) == ("127.0.0.1", port, True)
    assert (here.device, here.federation) == ("pi-flag", "home")
    assert way(state=tmp_path, broker="elsewhere").address.cert_file == here.address.cert_file
    for plain in ("mqtt://localhost", "mqtts://fedvit:x@localhost"):
        other = way(state=tmp_path, broker=plain)
        assert (other.identity, other.address.cert_file, other.device) == (None, None, None)
    assert way(state=tmp_path / "new").address == Address("localhost", 1883)
    for wrong in ({"device": "pi-2"}, {"federation": "away"}):
        with pytest.raises(ConfigError, check=has_code("FV1309")):
            way(state=tmp_path, **wrong)
    (tmp_path / "identity" / "membership.json").write_text("{")
    with pytest.raises(ConfigError, check=has_code("FV1309")):
        way(state=tmp_path)


def test_the_command_line_joins(stage: Stage, tmp_path: Path) -> None:
    token, other = (make_token(stage.deployment, name, 60.0).text() for name in ("pi-typed", "pi-other"))
    for _ in range(2):
        assert "joined as 'pi-typed'" in CliRunner().invoke(edge_cli, ["join", token, "--state", str(tmp_path)]).stdout
    refused = CliRunner().invoke(edge_cli, ["join", other, "--state", str(tmp_path)])
    assert isinstance(refused.exception, ConfigError)


def test_enroll_prints_a_line_that_needs_no_flag(tmp_path: Path) -> None:
    """The token says where the broker is."""
    deployment = make_deployment(tmp_path / "made")
    printed = run("enroll", "pi-1", "--no-wait", "--deployment", str(deployment.folder)).stdout
    _, command, token = printed.strip().split(" ")
    assert (command, Token.parse(token).host) == ("join", deployment.settings.hosts[0])


def test_enroll_ends_when_its_token_is_withdrawn(stage: Stage) -> None:
    """Not only when it expires."""
    done: list[Result] = []
    given = ["enroll", "pi-waits", "--deployment", str(stage.deployment.folder)]
    command = threading.Thread(target=lambda: done.append(run(*given)))
    command.start()
    wait_until(lambda: open_tokens(stage.deployment, "pi-waits"), "the token")
    run("revoke", "pi-waits", "--deployment", str(stage.deployment.folder))
    command.join(60)
    assert "this token for pi-waits was withdrawn" in str(done[0].exception)


def _command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def test_start_takes_no_deployment_from_the_environment() -> None:
    """A run has the broker that its command line or its file names; the other commands may find the folder there."""
    [start] = [option for option in _command("start").params if "--broker.deployment" in option.opts]
    assert start.envvar is None
    for name in ("enroll", "devices", "revoke"):
        [other] = [option for option in _command(name).params if "--deployment" in option.opts]
        assert other.envvar == "FEDVIT_DEPLOYMENT"


def test_devices_lists_members_and_quarantines(tmp_path: Path) -> None:
    """Two devices of a deployment; in the newest run one has a strike, in the run before the other was put away."""
    deployment, runs = make_deployment(tmp_path / "deployment"), tmp_path / "runs"
    for name in ("pi-1", "pi-2"):
        make_device(deployment, tmp_path / "keys", name)
    with open_record(runs) as store:
        for record, device, limit in (("older", "pi-2", 1), ("newest", "pi-1", 3)):
            store.runs.create(record, {})
            store.rounds.open(record, 1, ["pi-1", "pi-2"])
            Quarantine(record, store, RobustConfig(strikes=limit, quarantine_rounds=4)).strike(device, 1, "NaN")
    listed = ["devices", "--deployment", str(deployment.folder)]
    assert all("strikes" not in entry for entry in json.loads(run(*listed, "--json").stdout))
    here = json.loads(run(*listed, "--runs", str(runs), "--json").stdout)
    assert [(entry["device"], entry["state"], entry["run"], entry["strikes"]) for entry in here] == [
        ("pi-1", "valid", "newest", 1), ("pi-2", "valid", "newest", 0),
    ]  # fmt: skip
    _, put_away = json.loads(run(*listed, "--runs", str(runs), "--run", "older", "--json").stdout)
    assert (put_away["quarantine"], put_away["until_round"]) == ("1 strike, the last: NaN", 5)
    shown = run(*listed, "--runs", str(runs), "--run", "older").stdout
    assert {"in", "run", "older"} <= set(shown.split())
    assert isinstance(run(*listed, "--run", "older").exception, ConfigError)
    assert "'nope'" in str(run(*listed, "--runs", str(runs), "--run", "nope").exception)


# --- the clock ----------------------------------------------------------------------------------------


def handshake(authority: Authority, address: Address, name: str = "localhost") -> None:
    """What a device with this way to its broker does when the broker shows a certificate of `authority`."""
    assert address.ca_file is not None
    folder = address.ca_file.parent
    issued = authority.server(["localhost"], time.time())
    (folder / "server.pem").write_bytes(issued.certificate)
    (folder / "server.key").write_bytes(issued.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = tls_context(address).wrap_bio(ours, theirs, server_side=False, server_hostname=name)
    there = server.wrap_bio(theirs, ours, server_side=True)
    for step in (here, there):
        with pytest.raises(ssl.SSLWantReadError):
            step.do_handshake()
    here.do_handshake()


def trusting(folder: Path, authority: Authority) -> Address:
    folder.mkdir(exist_ok=True)
    (folder / "authority.pem").write_bytes(authority.pem)
    return Address("localhost", 1, tls=True, ca_file=folder / "authority.pem")


def test_clock_in_the_past_does_not_exclude_a_device(tmp_path: Path) -> None:
    """For a clock that says 1970 every deployment is of the future; here one of 3 years ahead. Name and authority are
    looked at as ever."""
    ahead = Authority.create("ahead", time.time() + 1000 * DAY_S)
    address = trusting(tmp_path / "a", ahead)
    handshake(ahead, address)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(ahead, address, "elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(Authority.create("ahead", time.time() + 1000 * DAY_S), address)


def test_a_clock_that_may_be_right_is_believed(tmp_path: Path) -> None:
    here = Authority.create("here", time.time())
    handshake(here, trusting(tmp_path / "a", here))
    gone = Authority.create("gone", time.time() - 3700 * DAY_S)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(gone, trusting(tmp_path / "b", gone))


def test_devices_are_listed_in_plain_letters(tmp_path: Path) -> None:
    """So that a terminal's search, and grep, find a date."""
    deployment = make_deployment(tmp_path / "deployment")
    with deployment.change() as rows:
        rows.put_device("pi-1", Certificate("ab", 1_700_000_000.0, 4_000_000_000.0), 1_700_000_000.0)
    output = CliRunner().invoke(cli, ["devices", "--deployment", str(deployment.folder)], catch_exceptions=False).output
    [row] = [line for line in output.splitlines() if line.startswith("pi-1")]
    assert " 2023-11-14 22:13 " in row
    assert "\N{NO-BREAK SPACE}" not in output
    assert "\N{NON-BREAKING HYPHEN}" not in output
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" not in output


# --- with a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "federation", "words"),
    [
        ({"broker": "embedded"}, "home", "needs mosquitto"),
        ({"password": "x"}, "home", "its own certificates"),
        ({}, "elsewhere", "the deployment is for 'home'"),
    ],
)
def test_settings_that_do_not_go_with_a_deployment(
    stage: Stage, tmp_path: Path, broker: dict[str, str], federation: str, words: str
) -> None:
    settings = BrokerConfig(deployment=str(stage.deployment.folder), **broker)
    with pytest.raises(ConfigError, match=words), broker_endpoint(settings, federation, tmp_path, lambda _: None):
        pass


def test_given_address_overrides_stored_one(stage: Stage, tmp_path: Path) -> None:
    identity = identity_of(stage.deployment, tmp_path, "pi-way", age_days=0.0)
    kept = identity.address()
    assert identity.address("elsewhere") == replace(kept, host="elsewhere")
    assert identity.address("elsewhere:1234") == replace(kept, host="elsewhere", port=1234)
    assert identity.address("mqtts://[::1]:99") == replace(kept, host="::1", port=99)
    assert identity.address("[::1]") == replace(kept, host="::1")
