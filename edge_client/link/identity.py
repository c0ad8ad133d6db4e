"""The identity of a device in a deployment: its private key, its certificate, and the broker's address.

The key was made here and never leaves the device. Only `join` needs the library cryptography, this module does not.

A renewed certificate lies beside the current one, which stays until the broker has accepted its successor. Each change
is one rename, so that a device that is killed at any moment has a certificate that the broker has accepted.
"""

import hashlib
import logging
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from fedvit.errors import BadPayload, ConfigError, FedvitError
from fedvit.files import atomic_write
from fedvit.transport.address import Address, tls_context
from fedvit.transport.base import Transport
from fedvit.wire.enrolment import Renewed, RenewRequest, decode_enrolment, encode_enrolment
from fedvit.wire.topics import Topics, check_name

log = logging.getLogger(__name__)

NEXT_CERTIFICATE = "next-certificate.pem"
REQUEST_INTERVAL_S = 3600.0
"""Interval between requests."""


class Membership(Struct, frozen=True, kw_only=True):
    """The name, federation and broker of this device."""

    device: str
    federation: str
    host: str
    port: int


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

    def use_next_certificate(self) -> None:
        """Drop the former certificate: the broker has accepted its successor."""
        self.next_certificate.replace(self.certificate)


def host_and_port(broker: str) -> tuple[str, int | None]:
    """Split HOST or HOST:PORT. Raises ConfigError when it is neither."""
    text = f"mqtts://{broker.removeprefix('mqtts://')}"
    return Address.parse(text).host, urlsplit(text).port


class Renewal:
    """Requests the next certificate at each connection and once an hour; the coordinator decides when it is due."""

    def __init__(self, identity: Identity, topics: Topics) -> None:
        device = identity.membership.device
        self.answers = topics.certificate_for(device)
        self.identity = identity
        self._questions = topics.renewal(device)
        self._asked_at: float | None = None

    def note_connected(self, transport: Transport, certificate: Path | None) -> None:
        """Called after each connection, with the certificate that the broker accepted."""
        try:
            if certificate == self.identity.next_certificate and certificate.is_file():
                self.identity.use_next_certificate()
                log.info("the broker accepted the new certificate")
            elif self.identity.next_certificate.is_file():
                log.warning("the broker does not accept the new certificate yet; the former one stays in use")
        except OSError as error:
            log.warning("the former certificate cannot be replaced", extra={"reason": str(error)})
        self._asked_at = None
        self.tick(transport)

    def ask_soon(self) -> None:
        """Ask again at the next tick: after a restart of the server, nobody may have heard the first request."""
        self._asked_at = None

    def tick(self, transport: Transport) -> None:
        """Called often while the link is up."""
        now = time.monotonic()
        if self._asked_at is not None and now - self._asked_at < REQUEST_INTERVAL_S:
            return
        self._asked_at = now
        try:
            transport.publish(self._questions, encode_enrolment(RenewRequest(self.identity.request)), qos=1)
        except (FedvitError, OSError) as error:
            log.warning("the next certificate cannot be requested", extra={"reason": str(error)})

    def on_answer(self, raw: bytes) -> None:
        try:
            message = decode_enrolment(raw)
            if not isinstance(message, Renewed):
                raise BadPayload("FV2311", f"a {type(message).__name__} is no certificate")
            self.identity.keep_next_certificate(message.certificate)
        except (FedvitError, OSError) as error:
            log.warning("certificate not renewed", extra={"reason": str(error)})
        else:
            log.info("certificate renewed", extra={"sha256": hashlib.sha256(message.certificate).hexdigest()[:16]})
