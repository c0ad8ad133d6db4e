"""What makes this device one of a deployment's: its private key, its certificate, and where the broker is.

The key was made here and never leaves. Nothing in this module needs a library of certificates: only `join` does.
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
from fedvit.transport.base import Transport
from fedvit.transport.mqtt import Address, tls_context
from fedvit.wire.enrolment import Renewed, RenewRequest, decode_enrolment, encode_enrolment
from fedvit.wire.topics import Topics, check_name

log = logging.getLogger(__name__)

ASK_AGAIN_S = 3600.0
"""A question may meet a coordinator that is just coming back, too."""


class Membership(Struct, frozen=True, kw_only=True):
    """Under which name this device is known, and where."""

    device: str
    federation: str
    host: str
    port: int


class Identity:
    """A device that has joined. Raises ConfigError when the folder does not hold what `join` left there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.membership = msgspec.json.decode((folder / "membership.json").read_bytes(), type=Membership)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"the identity in {folder} cannot be read ({error}); join again") from error
        check_name(self.membership.device, f"device in {folder}")
        check_name(self.membership.federation, f"federation in {folder}")

    @classmethod
    def find(cls, folder: Path) -> "Identity | None":
        """The identity in `folder`; None where nobody has joined."""
        return cls(folder) if (folder / "membership.json").is_file() else None

    @property
    def certificate(self) -> Path:
        return self.folder / "certificate.pem"

    @property
    def authority(self) -> Path:
        return self.folder / "authority.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def request(self) -> bytes:
        """PKCS #10, DER: made with the key; each next certificate is for the same key."""
        return (self.folder / "request.der").read_bytes()

    def address(self, broker: str | None = None) -> Address:
        """Where to connect and with what; `broker` is HOST or HOST:PORT where it has moved. Raises ConfigError."""
        host, port = (broker and host_and_port(broker)) or (self.membership.host, None)
        return Address(
            host,
            port or self.membership.port,
            tls=True,
            ca_file=self.authority,
            cert_file=self.certificate,
            key_file=self.key,
        )

    def replace_certificate(self, der: bytes) -> None:
        """Take the next certificate from the next connection on. Raises BadPayload when it is not for our key."""
        trial = self.folder / "next-certificate.pem"
        try:
            atomic_write(trial, ssl.DER_cert_to_PEM_cert(der).encode(), private=True)
            tls_context(Address("", 1, tls=True, ca_file=self.authority, cert_file=trial, key_file=self.key))
            trial.replace(self.certificate)
        except ConfigError as error:
            raise BadPayload(f"the new certificate cannot be used: {error}") from error
        finally:
            trial.unlink(missing_ok=True)


def host_and_port(broker: str) -> tuple[str, int | None]:
    """HOST or HOST:PORT in its parts. Raises ConfigError when it is neither."""
    text = f"mqtts://{broker.removeprefix('mqtts://')}"
    return Address.parse(text).host, urlsplit(text).port


class Renewal:
    """Asks for the next certificate at each connection and once an hour; the coordinator's clock decides."""

    def __init__(self, identity: Identity, topics: Topics) -> None:
        device = identity.membership.device
        self.answers = topics.renewed(device)
        self._identity = identity
        self._questions = topics.renewal(device)
        self._asked_at: float | None = None

    def connected(self, transport: Transport) -> None:
        self._asked_at = None
        self.tick(transport)

    def tick(self, transport: Transport) -> None:
        """Called often while the link is up."""
        here = time.monotonic()
        if self._asked_at is not None and here - self._asked_at < ASK_AGAIN_S:
            return
        self._asked_at = here
        try:
            transport.publish(self._questions, encode_enrolment(RenewRequest(self._identity.request)), qos=1)
        except (FedvitError, OSError) as error:
            log.warning("the next certificate cannot be asked for", extra={"reason": str(error)})

    def answered(self, raw: bytes) -> None:
        try:
            message = decode_enrolment(raw)
            if not isinstance(message, Renewed):
                raise BadPayload(f"a {type(message).__name__} is no certificate")
            self._identity.replace_certificate(message.certificate)
        except (FedvitError, OSError) as error:
            log.warning("certificate not renewed", extra={"reason": str(error)})
        else:
            log.info("certificate renewed", extra={"sha256": hashlib.sha256(message.certificate).hexdigest()[:16]})
