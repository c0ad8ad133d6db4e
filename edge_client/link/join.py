"""`edge-client join`: obtains a certificate with a one-time token.

Broker and device cannot trust each other yet, so TLS alone proves nothing here. Trust comes from the HMAC on every
message (fedvit.wire.enrolment), then from the authority's fingerprint in the token, and finally from a connection in
which both sides present certificates. The private key is made before anything is sent, and kept: an interrupted join
continues where it stopped, with the same token.
"""

import logging
import os
import queue
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion

from edge_client.link.identity import NEXT_CERTIFICATE, Identity, Membership
from fedvit.errors import BadPayload, ConfigError, LinkDown, PeerRefused, StorageFailed
from fedvit.files import atomic_write, name_failure
from fedvit.policy import POLICY_FILE
from fedvit.public_keys import PUBLISHER_FILE
from fedvit.transport.address import Address, describe_error
from fedvit.transport.base import Connected, Disconnected
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.enrolment import (
    FROM_COORDINATOR,
    FROM_DEVICE,
    JoinGranted,
    JoinRefused,
    JoinRequest,
    Token,
    seal,
    unseal,
)
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
ASK_AGAIN_S = 2.0
AGAIN_S = 1.0
REFUSALS = 5
TRY_S = 10.0
NOT_AUTHORISED = ("Not authorized", "Bad user name or password")


@dataclass(frozen=True)
class Joined:
    """A new identity, and why a first connection with it failed, if it did."""

    identity: Identity
    trouble: str | None


def join(
    token: Token,
    folder: Path,
    *,
    replace: bool = False,
    patience_s: float = PATIENCE_S,
    report: Callable[[str], None] = lambda _: None,
) -> Joined:
    """Get a certificate for the token's name and keep it in `folder`.

    A device that has joined with this token already keeps its certificate: a board that lost its power before the token
    was removed asks a second time.

    Raises ConfigError when this device has joined already, PeerRefused when the token is not valid (any more),
    LinkDown without an answer within `patience_s`, BadPayload when the answer is not authentic.
    """
    if (former := Identity.find(folder)) and former.membership.token == token.id:
        _clean(folder)
        return Joined(former, None)
    if former and not replace:
        raise ConfigError(
            "FV1306",
            f"this device has joined already, as {former.membership.device!r} ({folder}); --replace replaces it",
        )
    request = _request(folder, token)
    address = Address(token.host, token.enrolment_port)
    report(f"asking {address} for a certificate as {token.device!r}")
    granted = _ask(token, request, address, patience_s, report)
    if sha256(granted.authority).digest() != token.authority:
        raise PeerRefused("FV1307", "the answer names another authority than the token; it is not used")
    membership = Membership(
        device=token.device, federation=token.federation, host=token.host, port=token.port, token=token.id
    )
    _keep(folder, token, granted, membership)
    identity = Identity(folder)
    return Joined(identity, _try(identity))


def _request(folder: Path, token: Token) -> bytes:
    """The certificate request of the key that belongs to this token; both are made at the first attempt."""
    key_file, request_file = (folder / f"joining-{token.id}.{kind}" for kind in ("key", "request"))
    if request_file.is_file() and key_file.is_file():
        return request_file.read_bytes()
    with name_failure(f"cannot make folder {folder}", StorageFailed, "FV1701"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, token.device)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    atomic_write(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)
    atomic_write(request_file, request.public_bytes(Encoding.DER), private=True)
    return request_file.read_bytes()


def _keep(folder: Path, token: Token, granted: JoinGranted, membership: Membership) -> None:
    """Write the identity, and the token's policy and publisher.

    The membership comes last, as it marks the identity as complete.
    """
    for former in ("membership.json", NEXT_CERTIFICATE):
        (folder / former).unlink(missing_ok=True)
    files = {
        name: folder / f"joining-{token.id}.{kind}" for name, kind in (("key.pem", "key"), ("request.der", "request"))
    }
    for name, file in files.items():
        atomic_write(folder / name, file.read_bytes(), private=True)
    for name, der in (("certificate.pem", granted.certificate), ("authority.pem", granted.authority)):
        atomic_write(folder / name, ssl.DER_cert_to_PEM_cert(der).encode(), private=True)
    if token.policy:
        atomic_write(folder.parent / POLICY_FILE, token.policy.encode(), private=True)
    if token.publisher:
        atomic_write(folder.parent / PUBLISHER_FILE, f"{token.publisher}\n".encode(), private=True)
    atomic_write(folder / "membership.json", msgspec.json.encode(membership), private=True)
    _clean(folder)


def _clean(folder: Path) -> None:
    """Remove what only the joining needed, and give the identity to its owner."""
    for leftover in folder.glob("joining-*"):
        leftover.unlink()
    _hand_over(folder, folder.parent.stat().st_uid, folder.parent.stat().st_gid)


def _hand_over(folder: Path, user: int, group: int) -> None:
    """Give the files to the owner of the state: a service has a user of its own, but root may run the join."""
    if os.geteuid() == 0:
        own = [file for name in (POLICY_FILE, PUBLISHER_FILE) if (file := folder.parent / name).exists()]
        for path in (folder, *folder.iterdir(), *own):
            os.chown(path, user, group, follow_symlinks=False)


# --- request and answer ----------------------------------------------------------------------


def _ask(
    token: Token, request: bytes, address: Address, patience_s: float, report: Callable[[str], None]
) -> JoinGranted:
    """Request until an authentic answer comes, over several connections if needed."""
    question = JoinRequest(secrets.token_bytes(16), token.device, request)
    until = time.monotonic() + patience_s
    refusals, reported = 0, ""
    while time.monotonic() < until:
        conversation = _Conversation(token, question, address)
        try:
            return conversation.until(until)
        except LinkDown as error:
            reason = str(error)
        except _NotAuthorised:
            # the broker learns of a new token about a second later
            refusals += 1
            reason = f"{address}: the broker does not know this token"
            if refusals >= REFUSALS:
                raise PeerRefused(
                    "FV1304",
                    f"{reason}: it was withdrawn, expired long ago, or is for another deployment; "
                    "ask for a new one (coordinator enroll)",
                ) from None
        if reason != reported:
            report(f"{reason}; trying again")
            reported = reason
        time.sleep(AGAIN_S)
    raise LinkDown(
        "FV1305",
        f"{reported or f'{address} accepted the request, but no answer came'} (tried for {patience_s:.0f} s); is "
        "`coordinator start --broker.deployment FOLDER` or `coordinator enroll NAME` running, and is this the right "
        "--broker?",
    )


class _NotAuthorised(Exception):
    """The broker does not know the token."""


class _Conversation:
    """One connection to the enrolment listener; `until` returns the authentic answer."""

    def __init__(self, token: Token, question: JoinRequest, address: Address) -> None:
        self._token = token
        self._nonce = question.nonce
        self._question = seal(question, token.secret, FROM_DEVICE)
        self._topics = Topics(token.federation)
        self._address = address
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        self._ended: Exception | None = None
        self._listening = False

    def until(self, deadline: float) -> JoinGranted:
        """Raises PeerRefused when the coordinator refuses, LinkDown when the connection ends or no answer comes."""
        client = self._client()
        try:
            client.reconnect()
        except (OSError, ValueError) as error:
            raise LinkDown("FV1305", f"{self._address}: {describe_error(error)}") from error
        asked = 0.0
        try:
            while time.monotonic() < deadline:
                lost = client.loop(0.2) != MQTT_ERR_SUCCESS
                if self._ended or lost:
                    raise self._ended or LinkDown("FV1209", f"{self._address}: the connection was lost")
                if (granted := self._answer()) is not None:
                    return granted
                if self._listening and time.monotonic() - asked > ASK_AGAIN_S:
                    asked = time.monotonic()
                    client.publish(self._topics.enrolment(self._token.id), self._question, 1)
        finally:
            client.disconnect()
        raise LinkDown("FV1305", f"{self._address}: the broker accepted the token, but no coordinator answers")

    def _answer(self) -> JoinGranted | None:
        while not self._answers.empty():
            try:
                message = unseal(self._answers.get_nowait(), self._token.secret, FROM_COORDINATOR)
            except BadPayload as error:
                log.warning("an answer that is not authentic was ignored", extra={"reason": str(error)})
                continue
            match message:
                case JoinGranted(nonce=self._nonce, device=self._token.device):
                    return message
                case JoinRefused(nonce=self._nonce, reason=reason):
                    raise PeerRefused("FV1308", f"the coordinator refused: {reason}")
        return None

    def _client(self) -> Client:
        client = Client(CallbackAPIVersion.VERSION2, f"join-{secrets.token_hex(4)}", protocol=MQTTv311)
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # see the top of this file
        client.tls_set_context(context)
        client.username_pw_set(self._token.id, self._token.login)
        client.on_connect = self._on_connect
        client.on_subscribe = lambda *_: setattr(self, "_listening", True)
        client.on_message = lambda _client, _data, message: self._answers.put(bytes(message.payload))
        client.connect_async(self._address.host, self._address.port, 30)
        return client

    def _on_connect(self, client: Client, _data: object, _flags: object, reason: object, _more: object) -> None:
        if str(reason) in NOT_AUTHORISED:
            self._ended = _NotAuthorised()
        elif str(reason) != "Success":
            self._ended = LinkDown("FV1305", f"{self._address}: broker refused: {str(reason).lower()}")
        else:
            client.subscribe(self._topics.enrolment_reply(self._token.id), 1)


def _try(identity: Identity) -> str | None:
    """Connect once with the new identity; returns the reason if that failed, else None."""
    inbox: SimpleQueue[object] = SimpleQueue()
    address = identity.address()
    transport = MqttTransport(inbox, address, client_id=f"{identity.membership.device}-{secrets.token_hex(4)}")
    transport.open()
    trouble = f"{address}: no answer within {TRY_S:.0f} s"
    until = time.monotonic() + TRY_S
    try:
        while (left_s := until - time.monotonic()) > 0:
            match inbox.get(timeout=left_s):
                case Connected():
                    return None
                case Disconnected(reason=reason):
                    trouble = reason
    except queue.Empty:
        pass
    finally:
        transport.close()
    return trouble
