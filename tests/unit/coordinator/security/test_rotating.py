"""Rotation of a deployment's authority, at a real mosquitto."""

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.cli import cli
from coordinator.security import folder as folder_module
from coordinator.security import own_certificates, tending
from coordinator.security.authority import DAY_S, Authority
from coordinator.security.broker.process import Broker
from coordinator.security.folder import Deployment, make_token
from coordinator.security.own_certificates import renew_own
from coordinator.security.rotating import begin_rotation, finish_rotation, read_rotation
from coordinator.security.rotations import RotationRows
from coordinator.security.service import Service
from edge_client.link import identity as identity_module
from edge_client.link import join as join_module
from edge_client.link.identity import Identity, Renewal
from edge_client.link.join import join
from fedvit.errors import BadPayload, ConfigError, PeerRefused
from fedvit.transport.address import tls_context
from fedvit.transport.base import Connected, Received
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.enrolment import Renewed, RenewRequest, decode_enrolment, encode_enrolment
from tests.support.codes import has_code
from tests.support.deployments import make_deployment, make_request, serve_deployment
from tests.support.mqtt_client import Client
from tests.support.rotations import HOME, check_files, join_device, list_trusted, run_device
from tests.support.waiting import wait_until

LONG_S = 30 * DAY_S


class Stage(NamedTuple):
    deployment: Deployment
    service: Service
    said: list[str]

    @property
    def broker(self) -> Broker:
        assert self.service.broker is not None
        return self.service.broker

    def has_said(self, words: str) -> bool:
        return any(words in line for line in self.said)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A deployment that is being served."""
    monkeypatch.setattr(tending, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(join_module, "AGAIN_S", 0.2)
    monkeypatch.setattr(identity_module, "REQUEST_INTERVAL_S", 0.5)
    said: list[str] = []
    deployment = make_deployment(tmp_path / "deployment")
    with serve_deployment(deployment, said.append) as service:
        yield Stage(deployment, service, said)


def run(deployment: Deployment, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--deployment", str(deployment.folder)])


def read_json(deployment: Deployment, *arguments: str) -> dict[str, object]:
    done = run(deployment, "rotate-authority", *arguments, "--json")
    assert done.exit_code == 0, done.exception
    return dict(json.loads(done.stdout))


def read_states(deployment: Deployment) -> dict[str, str]:
    return {entry["device"]: entry["state"] for entry in json.loads(run(deployment, "devices", "--json").stdout)}


# --- the whole of it ----------------------------------------------------------------------------------


def test_devices_move_by_themselves_and_then_the_rotation_ends(stage: Stage, tmp_path: Path) -> None:
    deployment, former = stage.deployment, stage.deployment.authority
    identities = [join_device(deployment, tmp_path, name) for name in ("pi-1", "pi-2")]
    before = identities[0].certificate.read_bytes()
    own = (deployment.folder / "server.key").read_bytes()
    with run_device(identities[0]), run_device(identities[1]):
        begun = read_json(deployment)
        assert begun["authority"] == former.digest.hex()
        new = begun["next_authority"]
        wait_until(lambda: deployment.authority.digest.hex() == new, "the end of the rotation")
        for identity in identities:
            wait_until(lambda identity=identity: list_trusted(identity) == [new], "the device drops the former one")
    assert stage.has_said("2 devices moved")
    check_files(deployment)
    assert (deployment.folder / "server.key").read_bytes() != own
    assert read_states(deployment) == {"pi-1": "valid", "pi-2": "valid"}
    assert Client(identities[0].address(), "again").connected
    identities[0].certificate.write_bytes(before)
    assert not Client(identities[0].address(), "former").connected, "the former authority is still trusted"
    assert Client(join_device(deployment, tmp_path, "pi-3").address(), "later").connected
    with deployment.registry.read() as rows:
        assert RotationRows(rows).find_open() is None
    # a second rotation begins where the first one ended
    with run_device(identities[1]):
        begin_rotation(deployment, LONG_S)
        wait_until(lambda: "pi-2" in read_rotation(deployment).updated, "the next move")
        assert read_rotation(deployment).awaited == ["pi-1", "pi-3"]


def test_a_device_that_the_broker_refused_once_tries_its_new_certificate_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_module, "REQUEST_INTERVAL_S", 3600.0)
    monkeypatch.setattr(identity_module, "FIRST_INTERVAL_S", 0.2)
    deployment, identity = stage.deployment, join_device(stage.deployment, tmp_path, "pi-1")
    reconnects: list[str] = []
    with run_device(identity) as transport:
        reconnect, address = transport.reconnect, transport._connector.address

        def reconnect_refused_once(reason: str) -> None:
            """Connect with the former certificate, as after a refusal of the new one."""
            reconnects.append(reason)
            transport._connector.address = replace(address, next_cert_file=None) if len(reconnects) == 1 else address
            reconnect(reason)

        monkeypatch.setattr(transport, "reconnect", reconnect_refused_once)
        new = read_json(deployment)["next_authority"]
        wait_until(lambda: list_trusted(identity) == [new], "the device to move")
    assert len(reconnects) > 1


def test_a_request_that_nobody_heard_is_sent_again(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may be back at a restarted broker before the server is: its first request reaches nobody."""
    monkeypatch.setattr(identity_module, "REQUEST_INTERVAL_S", 3600.0)
    monkeypatch.setattr(identity_module, "FIRST_INTERVAL_S", 0.01)
    identity, broker = join_device(stage.deployment, tmp_path, "pi-1"), MemoryBroker()
    renewal, device = Renewal(identity, HOME), MemoryTransport(SimpleQueue(), broker, "pi-1")
    device.open()
    renewal.note_connected(device, identity.certificate)
    heard: SimpleQueue[object] = SimpleQueue()
    server = MemoryTransport(heard, broker, "server")
    server.subscribe(HOME.renewal("+"), 1)
    server.open()
    assert isinstance(heard.get(), Connected)
    wait_until(lambda: not heard.empty(), "the second request", meanwhile=lambda: renewal.tick(device))
    request = heard.get()
    assert isinstance(request, Received)
    assert decode_enrolment(request.payload) == RenewRequest(identity.request, identity.list_digests())


@pytest.mark.slow
def test_a_device_that_was_away_is_left_behind_and_named(stage: Stage, tmp_path: Path) -> None:
    deployment = stage.deployment
    here, away = (join_device(deployment, tmp_path, name) for name in ("pi-here", "pi-away"))
    token = make_token(deployment, "pi-late", 600.0)
    with run_device(here):
        begun = read_json(deployment, "--within", "2h")
        assert begun["open_tokens"] == ["pi-late"]
        wait_until(lambda: read_rotation(deployment).updated == ["pi-here"], "the move")
        assert read_json(deployment, "--status")["awaited"] == ["pi-away"]
        shown = run(deployment, "rotate-authority", "--status").stdout
        assert "1 of 2 devices have moved" in shown
        assert Client(away.address(), "former").connected, "both are trusted until the end"
        assert "authority" in run(deployment, "devices").stdout
        ended = run(deployment, "rotate-authority", "--finish")
        assert ended.exit_code == 0, ended.exception
        assert "pi-away has the former authority" in ended.stdout
        assert "coordinator enroll pi-away --replace" in ended.stdout
        wait_until(lambda: list_trusted(here) == [deployment.authority.digest.hex()], "the end at the device")
    assert not Client(away.address(), "too late").connected
    assert read_states(deployment) == {"pi-away": "former authority", "pi-here": "valid"}
    with pytest.raises(PeerRefused, check=has_code("FV1308", "new authority")):
        join(token, tmp_path / "late" / "identity")
    again = make_token(deployment, "pi-away", 60.0, replaces=True)
    assert join(again, away.folder, replace=True).trouble is None
    assert read_states(deployment)["pi-away"] == "valid"


def test_the_rotation_ends_with_its_time_unless_the_clock_is_in_doubt(stage: Stage, tmp_path: Path) -> None:
    deployment = stage.deployment
    join_device(deployment, tmp_path, "pi-away")
    begin_rotation(deployment, LONG_S)
    with deployment.change() as rows:
        rows.set_clock(time.time() - 65 * DAY_S)
    wait_until(lambda: stage.has_said("65 days ahead of"), "the warning")
    tending_now = tending.Tending(deployment, stage.said.append, restarts=True)
    with pytest.MonkeyPatch.context() as later:
        later.setattr(tending, "now", lambda: time.time() + 2 * LONG_S)
        tending_now.tend()
        assert read_rotation(deployment).next is not None
        with pytest.raises(ConfigError, check=has_code("FV1303")):
            finish_rotation(deployment)
        run(deployment, "devices", "--confirm-clock")
        wait_until(lambda: read_rotation(deployment).next is None, "the end of its time")
    wait_until(lambda: stage.has_said("pi-away has the former authority"), "the device that is left behind")


def test_a_device_of_earlier_software_keeps_its_authority(stage: Stage, tmp_path: Path) -> None:
    """Its request names no authorities; the next certificate that is due is of the former one."""
    deployment, former = stage.deployment, stage.deployment.authority
    identity = join_device(deployment, tmp_path, "pi-old")
    begin_rotation(deployment, LONG_S)
    wait_until(lambda: stage.has_said("the authorities that it trusts have changed"), "the broker")
    request = encode_enrolment(RenewRequest(identity.request))
    with Client(identity.address(), "asking", [HOME.certificate_for("pi-old")]) as client:
        with deployment.change() as rows:  # in its last third
            entry = rows.find_device("pi-old")
            assert entry is not None
            soon = replace_end(entry.certificates[0].serial)
            rows.connection.exec_driver_sql(soon)

        def ask() -> bool:
            client.publish(HOME.renewal("pi-old"), request)
            return bool(client.seen)

        wait_until(ask, "an answer", pause_s=0.5)
    message = decode_enrolment(client.seen[0][1])
    assert isinstance(message, Renewed)
    assert (message.authority, message.endorsement) == (b"", b"")
    assert former.has_issued(x509.load_der_x509_certificate(message.certificate))
    assert read_rotation(deployment).awaited == ["pi-old"]


def replace_end(serial: str) -> str:
    begun_s, end_s = time.time() - 80 * DAY_S, time.time() + 10 * DAY_S
    return f"update certificates set issued_at = {begun_s}, expires_at = {end_s} where serial = '{serial}'"


@pytest.mark.slow
def test_a_device_that_moved_can_be_revoked(stage: Stage, tmp_path: Path) -> None:
    identity, _ = (join_device(stage.deployment, tmp_path, name) for name in ("pi-gone", "pi-away"))
    with run_device(identity):
        begin_rotation(stage.deployment, LONG_S)
        wait_until(lambda: read_rotation(stage.deployment).updated == ["pi-gone"], "the move")
    assert Client(identity.address(), "before").connected
    assert run(stage.deployment, "revoke", "pi-gone").exit_code == 0
    assert not Client(identity.address(), "after").connected


# --- errors -------------------------------------------------------------------------------------------


def test_what_cannot_be_done(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    for arguments, code in (
        (["--finish"], "FV1322"),
        (["--within", "5"], "FV1324"),
    ):
        failed = run(deployment, "rotate-authority", *arguments)
        assert isinstance(failed.exception, ConfigError)
        assert failed.exception.code == code
    assert run(deployment, "rotate-authority").exit_code == 0
    again = run(deployment, "rotate-authority")
    assert isinstance(again.exception, ConfigError)
    assert again.exception.code == "FV1321"
    for name in ("rotate-authority", "renew"):
        elsewhere = CliRunner().invoke(cli, [name, "--deployment", str(tmp_path)])
        assert isinstance(elsewhere.exception, ConfigError)
        assert elsewhere.exception.code == "FV1310"
    with deployment.change() as rows:
        rows.set_clock(time.time() - 65 * DAY_S)
    assert deployment.registry.generation()
    with pytest.raises(ConfigError, check=has_code("FV1303", "65 days ahead")):
        begin_rotation(make_wrong(tmp_path / "other"), LONG_S)


def test_acts_stand_in_the_audit(tmp_path: Path) -> None:
    """Each of several devices has an entry. If one name is unknown, no device is revoked."""
    deployment = make_deployment(tmp_path / "deployment")
    made = json.loads(run(deployment, "enroll", "a", "b", "--no-wait", "--json").stdout)
    assert [entry["device"] for entry in made] == ["a", "b"]
    alone = json.loads(run(deployment, "enroll", "c", "--no-wait", "--json").stdout)
    assert alone.keys() == {"device", "token", "publisher", "expires"}
    named = run(deployment, "enroll", "d", "e", "--no-wait")
    assert [line for line in named.stderr.splitlines() if line.endswith(":")][1:] == ["d:", "e:"]
    assert [line.split()[:2] for line in named.stdout.splitlines()] == [["edge-client", "join"]] * 2
    assert run(deployment, "revoke", "a", "unknown").exit_code != 0
    revoked = json.loads(run(deployment, "revoke", "a", "b", "--json").stdout)
    assert revoked["revoked"] == ["a", "b"]
    for words in (["renew"], ["rotate-authority"], ["rotate-authority", "--finish"]):
        assert run(deployment, *words).exit_code == 0
    with deployment.registry.read() as rows:
        entries = [(entry.act, entry.subject) for entry in rows.read_audit()]
    new = deployment.authority.digest.hex()
    assert entries == [
        ("enroll", "a"), ("enroll", "b"), ("enroll", "c"), ("enroll", "d"), ("enroll", "e"),
        ("revoke", "a"), ("revoke", "b"),
        ("renew", "server.pem, coordinator.pem"), ("rotate-authority", new), ("finish rotation", new),
    ]  # fmt: skip


def test_a_card_is_for_one_device(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    card = ["--boot", str(tmp_path), "--package", str(tmp_path / "fedvit-edge.deb")]
    for words in (["a", "b"], ["a", "--count", "2"]):
        assert "--boot writes one card" in run(deployment, "enroll", *words, *card, "--no-wait").output


def make_wrong(folder: Path) -> Deployment:
    """Make a deployment whose newest date is two months back."""
    deployment = make_deployment(folder)
    with deployment.change() as rows:
        rows.set_clock(time.time() - 65 * DAY_S)
    return deployment


# --- what a device accepts ----------------------------------------------------------------------------


def _make_identity(folder: Path, authority: Authority) -> Identity:
    _, request = make_request()
    certificate = authority.device("pi", request, time.time())
    folder.mkdir()
    (folder / "authority.pem").write_bytes(authority.pem)
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "membership.json").write_text('{"device":"pi","federation":"home","host":"localhost","port":1}')
    return Identity(folder)


def _as_leaf(authority: Authority, new: Authority) -> bytes:
    """A certificate of a device that the former authority has signed, with the new authority's name."""
    return authority.device("fedvit new", make_request()[1], time.time()).public_bytes(Encoding.DER)


FORGERIES: dict[str, Callable[[Authority, Authority, Authority], tuple[bytes, bytes]]] = {
    "signed by itself": lambda ours, new, _: (new.der, new.der),
    "signed by another one": lambda ours, new, other: (new.der, other.endorse(new)),
    "the signature is for another one": lambda ours, new, other: (new.der, ours.endorse(other)),
    "the endorsement is a device's": lambda ours, new, _: (new.der, _as_leaf(ours, new)),
    "the authority is a device's": lambda ours, new, _: (_as_leaf(ours, new), ours.endorse(new)),
    "the authority is the endorsement": lambda ours, new, _: (ours.endorse(new), ours.endorse(new)),
    "no endorsement": lambda ours, new, _: (new.der, b""),
    "no certificate": lambda ours, new, _: (b"junk", ours.endorse(new)),
    "a changed byte": lambda ours, new, _: (new.der, ours.endorse(new)[:-1] + b"\0"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_authority_that_the_pinned_one_did_not_sign_is_not_trusted(tmp_path: Path, name: str) -> None:
    ours, new, other = (Authority.create(f"fedvit {name}", time.time()) for name in ("ours", "new", "other"))
    identity = _make_identity(tmp_path / "identity", ours)
    with pytest.raises(BadPayload, check=has_code("FV1323")):
        identity.trust_successor(*FORGERIES[name](ours, new, other))
    assert identity.authority.read_bytes() == ours.pem


def test_a_signed_authority_is_trusted_beside_the_former_one(tmp_path: Path) -> None:
    ours, new, other = (Authority.create(f"fedvit {name}", time.time()) for name in ("ours", "new", "other"))
    identity = _make_identity(tmp_path / "identity", ours)
    for _ in range(2):
        assert identity.trust_successor(new.der, ours.endorse(new))
    assert identity.read_authorities() == [ours.der, new.der]
    assert identity.list_digests() == (ours.digest, new.digest)
    broker = {one: one.server(["localhost"], time.time()).certificate for one in (ours, new, other)}
    for one in (ours, new, other):
        assert not identity.end_rotation(ssl.PEM_cert_to_DER_cert(broker[one].decode())), "its own is of the former"
    certificate = new.device("pi", make_request()[1], time.time())
    identity.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    for one, ends in ((other, False), (ours, False), (new, True)):
        assert identity.end_rotation(ssl.PEM_cert_to_DER_cert(broker[one].decode())) == ends
    assert identity.read_authorities() == [new.der]


# --- kills --------------------------------------------------------------------------------------------


class _Killed(BaseException):
    """The process ends here: nothing that it would do later is done."""


def _count_writes(act: Callable[[], object], stop_at: int | None = None) -> int:
    """Count the files that `act` writes; end it before the one with this number."""
    count, real = 0, folder_module.atomic_write

    def write(*arguments: object, **settings: object) -> None:
        nonlocal count
        if count == stop_at:
            raise _Killed
        count += 1
        real(*arguments, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Killed):
        for module in (folder_module, own_certificates):
            patch.setattr(module, "atomic_write", write)
        act()
    return count


@pytest.mark.slow
def test_a_rotation_that_is_killed_at_any_file_is_completed(tmp_path: Path) -> None:
    for stop_at in range(20):
        deployment = make_deployment(tmp_path / f"deployment-{stop_at}")
        former = deployment.authority.digest
        begun = _count_writes(lambda deployment=deployment: begin_rotation(deployment, LONG_S), stop_at)
        reopened = Deployment.open(deployment.folder)
        reopened.settle()
        check_files(reopened)
        assert reopened.authority.digest == former
        assert len(x509.load_pem_x509_certificates(reopened.authority_file.read_bytes())) == 2
        ended = _count_writes(lambda reopened=reopened: finish_rotation(reopened), stop_at)
        again = Deployment.open(deployment.folder)
        again.write_configuration()
        check_files(again)
        assert again.authority.digest != former
        assert len(x509.load_pem_x509_certificates(again.authority_file.read_bytes())) == 1
        assert read_rotation(again).next is None
        if max(begun, ended) < stop_at:
            return
    pytest.fail("a rotation writes more files than expected")


# --- the certificates of broker and coordinator --------------------------------------------------------


def test_own_certificates_are_renewed_once_a_year_for_the_same_key(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path / "deployment")
    key, authority = (deployment.folder / "server.key").read_bytes(), deployment.authority

    def renew(days: float) -> list[str]:
        at_s = time.time() + days * DAY_S
        return renew_own(deployment.folder, authority, "fedvit.coordinator", ["localhost"], at_s)

    assert renew(364) == []
    assert renew(-1000) == [], "a clock that is behind"
    assert renew(366) == ["server.pem", "coordinator.pem"]
    assert renew(366) == []
    assert renew(3640) == ["server.pem", "coordinator.pem"]
    assert renew(3649) == [], "none lasts longer than the authority"
    assert (deployment.folder / "server.key").read_bytes() == key
    (deployment.folder / "server.key").write_bytes((deployment.folder / "coordinator.key").read_bytes())
    assert renew(1) == ["server.pem"]
    check_files(deployment)


def test_the_broker_reads_its_renewed_certificate_without_a_restart(stage: Stage) -> None:
    address, pid = stage.deployment.address, stage.broker.pid

    def read_serial() -> int:
        with (
            socket.create_connection((address.host, address.port), 5) as plain,
            tls_context(address).wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            certificate = secured.getpeercert(binary_form=True)
            assert certificate is not None
            return x509.load_der_x509_certificate(certificate).serial_number

    before = read_serial()
    with Client(address, "stays") as client:
        done = json.loads(run(stage.deployment, "renew", "--json").stdout)
        assert [entry["file"] for entry in done["renewed"]] == ["server.pem", "coordinator.pem"]
        wait_until(lambda: read_serial() != before, "the new certificate")
        assert client.connected
    assert stage.broker.pid == pid
