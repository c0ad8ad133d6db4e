"""The identity of a device in a deployment: its private key, its certificate, and the broker's address.

The key was made here and never leaves the device. Only `join` needs the library cryptography, this module does not.

A renewed certificate lies beside the current one, which stays until the broker has accepted its successor. Each change
is one rename, so that a device that is killed at any moment has a certificate that the broker has accepted.

While the deployment's authority is rotated, `authority.pem` has the former and the new one. The former is dropped when
broker and device both have certificates of the new one.
"""

import hashlib
import logging
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from edge_client.link.resending import Resend
from fedvit.errors import BadPayload, ConfigError, FedvitError
from fedvit.files import atomic_write
from fedvit.transport.address import Address, tls_context
from fedvit.transport.base import Transport
from fedvit.wire.enrolment import Renewed, RenewRequest, decode_enrolment, encode_enrolment
from fedvit.wire.topics import Topics, check_name

log = logging.getLogger(__name__)

NEXT_CERTIFICATE = "next-certificate.pem"
REQUEST_INTERVAL_S = 3600.0
"""Longest interval between requests."""
FIRST_INTERVAL_S = 30.0
"""Interval between the first two requests, of which the server may hear none, and between the first two attempts to
connect with a certificate of a new authority. Both double up to REQUEST_INTERVAL_S."""


class Membership(Struct, frozen=True, kw_only=True):
    """The name, federation and broker of this device."""

    device: str
    federation: str
    host: str
    port: int
    token: str = ""  # id of the token that it joined with


class Identity:
    """The identity of a device that has joined. Raises ConfigError when the files of `join` cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.membership = msgspec.json.decode((folder / "membership.json").read_bytes(), type=Membership)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("FV1309", f"the identity in {folder} cannot be read ({error}); join again") from error
        check_name(self.membership.device, f"device in {folder}")
        check_name(self.membership.federation, f"federation in {folder}")

    @classmethod
    def find(cls, folder: Path) -> "Identity | None":
        """The identity in `folder`; None if the device has not joined."""
        return cls(folder) if (folder / "membership.json").is_file() else None

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def next_certificate(self) -> Path:
        """The newest certificate; it exists until the broker has accepted it, and is for the same key."""
        return self.folder / NEXT_CERTIFICATE

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def request(self) -> bytes:
        """The certificate request, PKCS #10 DER; every later certificate is for the same key."""
        return (self.folder / "request.der").read_bytes()

    def address(self, broker: str | None = None) -> Address:
        """The broker's address and the TLS files; `broker` is HOST or HOST:PORT if it has moved. Raises ConfigError."""
        host, port = (broker and host_and_port(broker)) or (self.membership.host, None)
        return Address(
            host,
            port or self.membership.port,
            tls=True,
            ca_file=self.authority,
            cert_file=self.certificate,
            key_file=self.key,
            next_cert_file=self.next_certificate,
        )

    def keep_next_certificate(self, der: bytes) -> None:
        """Try this certificate from the next connection on. Raises BadPayload when it is for another key."""
        trial = self.folder / "trial-certificate.pem"
        try:
            atomic_write(trial, ssl.DER_cert_to_PEM_cert(der).encode(), private=True)
            tls_context(Address("", 1, tls=True, ca_file=self.authority, cert_file=trial, key_file=self.key))
            trial.replace(self.next_certificate)
        except ConfigError as error:
            raise BadPayload("FV2311", f"the new certificate cannot be used: {error}") from error
        finally:
            trial.unlink(missing_ok=True)

    def read_authorities(self) -> list[bytes]:
        """The authorities that this device trusts, DER: one, or the former and the new one. Raises ConfigError."""
        return _read_certificates(self.authority)

    def list_digests(self) -> tuple[bytes, ...]:
        """SHA-256 of the authorities that this device trusts; the first has issued its certificate."""
        authorities = self.read_authorities()
        own = self._find_own(authorities)
        return tuple(hashlib.sha256(one).digest() for one in sorted(authorities, key=lambda one: one != own))

    def trust_successor(self, successor: bytes, endorsement: bytes) -> bool:
        """Trust a new authority (DER) beside the former one; True if this device has no certificate of it.

        Raises BadPayload unless an authority that this device trusts has signed it.
        """
        from edge_client.link.succession import check_successor

        authorities = self.read_authorities()
        former = check_successor(successor, endorsement, authorities)
        if successor not in authorities:
            self._write_authorities(former, successor)
        return self._find_own(self.read_authorities()) != successor

    def end_rotation(self, broker: bytes | None) -> bool:
        """Drop the former authority if the broker (its certificate, DER) and this device have certificates of the new
        one; True if so. Raises ConfigError."""
        authorities = self.read_authorities()
        if broker is None or len(authorities) == 1:
            return False
        from edge_client.link.succession import find_issuer

        new = authorities[-1]
        if not (find_issuer(broker, authorities) == self._find_own(authorities) == new):
            return False
        self._write_authorities(new)
        return True

    def _find_own(self, authorities: list[bytes]) -> bytes | None:
        """Return the authority of the certificate that the broker has accepted."""
        if len(authorities) == 1:
            return authorities[0]
        from edge_client.link.succession import find_issuer

        return find_issuer(_read_certificates(self.certificate)[0], authorities)

    def _write_authorities(self, *authorities: bytes) -> None:
        pem = "".join(map(ssl.DER_cert_to_PEM_cert, authorities))
        atomic_write(self.authority, pem.encode(), private=True)

    def use_next_certificate(self) -> None:
        """Drop the former certificate: the broker has accepted its successor."""
        self.next_certificate.replace(self.certificate)


def _read_certificates(file: Path) -> list[bytes]:
    """Return the certificates of a PEM file, DER, at least one. Raises ConfigError."""
    try:
        pieces = file.read_text().split(ssl.PEM_FOOTER)[:-1]
        found = [ssl.PEM_cert_to_DER_cert(f"{piece.strip()}\n{ssl.PEM_FOOTER}") for piece in pieces]
    except (OSError, ValueError) as error:
        raise ConfigError("FV1309", f"{file} cannot be read: {error}") from error
    if not found:
        raise ConfigError("FV1309", f"{file} holds no certificate")
    return found


def host_and_port(broker: str) -> tuple[str, int | None]:
    """Split HOST or HOST:PORT. Raises ConfigError when it is neither."""
    text = f"mqtts://{broker.removeprefix('mqtts://')}"
    return Address.parse(text).host, urlsplit(text).port


class Renewal:
    """Requests the next certificate at each connection and later; the coordinator decides when it is due."""

    def __init__(self, identity: Identity, topics: Topics) -> None:
        device = identity.membership.device
        self.answers = topics.certificate_for(device)
        self.identity = identity
        self._questions = topics.renewal(device)
        self._next_request: Resend | None = None  # None: ask at the next tick
        self._moves = False  # it has just got a certificate of a new authority
        self._next_attempt: Resend | None = None  # to connect with it, if the broker did not trust it yet

    def note_connected(self, transport: Transport, certificate: Path | None) -> None:
        """Called after each connection, with the certificate that the broker accepted."""
        try:
            if certificate == self.identity.next_certificate and certificate.is_file():
                self.identity.use_next_certificate()
                self._next_attempt = None
                log.info("the broker accepted the new certificate")
            elif self.identity.next_certificate.is_file():
                log.warning("the broker does not accept the new certificate yet; the former one stays in use")
            if self.identity.end_rotation(transport.broker_certificate):
                log.info("the former authority is no longer trusted")
        except (OSError, ConfigError) as error:
            log.warning("the former certificate cannot be replaced", extra={"reason": str(error)})
        self._next_request, self._moves = None, False
        self.tick(transport)

    def ask_soon(self) -> None:
        """Ask again at the next tick: after a restart of the server, nobody may have heard the first request."""
        self._next_request = None

    def tick(self, transport: Transport) -> None:
        """Called often while the link is up."""
        if self._moves and (self._next_attempt is None or self._next_attempt.due()):
            self._next_attempt, self._moves = self._next_attempt or _begin_interval(), False
            transport.reconnect("connecting again with a certificate of the new authority")
            return
        if self._next_request is not None and not self._next_request.due():
            return
        self._next_request = self._next_request or _begin_interval()
        try:
            request = RenewRequest(self.identity.request, self.identity.list_digests())
            transport.publish(self._questions, encode_enrolment(request), qos=1)
        except (FedvitError, OSError) as error:
            log.warning("the next certificate cannot be requested", extra={"reason": str(error)})

    def on_answer(self, raw: bytes) -> None:
        try:
            message = decode_enrolment(raw)
            if not isinstance(message, Renewed):
                raise BadPayload("FV2311", f"a {type(message).__name__} is no certificate")
            moves = bool(message.authority) and self.identity.trust_successor(message.authority, message.endorsement)
            self.identity.keep_next_certificate(message.certificate)
            self._moves |= moves
        except (FedvitError, OSError) as error:
            log.warning("certificate not renewed", extra={"reason": str(error)})
        else:
            log.info("certificate renewed", extra={"sha256": hashlib.sha256(message.certificate).hexdigest()[:16]})


def _begin_interval() -> Resend:
    return Resend(FIRST_INTERVAL_S, most_s=REQUEST_INTERVAL_S)
