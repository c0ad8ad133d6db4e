"""The one-time token and the messages with which a device gets its certificate. Pure, like all of the wire.

A device that requests its first certificate cannot authenticate itself by TLS, and cannot verify the broker yet. So
every message of a join has an HMAC-SHA256 with the token's secret, with a separate key for each direction: without the
secret nobody can request a certificate or issue one. The secret itself is never sent. Renewals use the connection that
the current certificate authenticates, on topics of that device only, and need no HMAC.

Bytes of a message: a version byte, then msgpack of an array that begins with the tag; of a sealed one: a version byte,
32 bytes of HMAC over everything else, and the same. The rules of evolution of messages.py hold here, too.
"""

import base64
import binascii
import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fedvit.errors import BadPayload, ConfigError, PeerRefused
from fedvit.public_keys import PublicKey
from fedvit.wire.topics import check_name

ENROLMENT_VERSION = 1
MAX_ENROLMENT_BYTES = 8 * 1024
"""Three certificates are about 2 kB."""
SECRET_BYTES = 16
MAC_BYTES = 32
TOKEN_PREFIX = "fedvit1-"
MAX_POLICY_CHARACTERS = 2000
"""Size of a policy in a token, which people copy."""
_CHECK_BYTES = 4
MOST_AUTHORITIES = 4
"""Most authorities that a request names; a device trusts two at most."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]

FROM_DEVICE = b"fedvit enrolment: device to coordinator"
FROM_COORDINATOR = b"fedvit enrolment: coordinator to device"
_LOGIN = b"fedvit enrolment: login"


class Token(Struct, frozen=True, array_like=True):
    """A one-time token for one device, created by the operator."""

    id: str
    secret: bytes
    device: str  # the name that the certificate will carry
    federation: str
    authority: bytes  # SHA-256 of the authority's certificate, DER
    host: str  # of the broker, unless the device gets another one
    port: int  # for devices with a certificate
    enrolment_port: int  # for those without
    policy: Annotated[str, Meta(max_length=MAX_POLICY_CHARACTERS)] = ""  # TOML, of the owner; empty: none
    publisher: PublicKey = ""  # whose graphs the device will run; empty: none

    def text(self) -> str:
        """Form that people copy: letters, digits, '-' and '_'."""
        *fields, policy, publisher = msgspec.structs.astuple(self)
        added = (policy, publisher) if publisher else (policy,) if policy else ()
        raw = msgspec.msgpack.encode([*fields, *added])
        return TOKEN_PREFIX + base64.urlsafe_b64encode(_checksum(raw) + raw).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Raises ConfigError when it is incomplete."""
        text = "".join(text.split())
        if not text.startswith(TOKEN_PREFIX):
            raise ConfigError("FV1301", f"this is not a join token: expected text that begins with {TOKEN_PREFIX!r}")
        try:
            body = text.removeprefix(TOKEN_PREFIX)
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            check, raw = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
            token = msgspec.msgpack.decode(raw, type=cls)
        except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError("FV1301", "the join token cannot be read; was all of it copied?") from error
        if check != _checksum(raw) or len(token.secret) != SECRET_BYTES:
            raise ConfigError("FV1301", "the join token has a wrong character; copy it again")
        check_name(token.device, "device name in the token")
        check_name(token.federation, "federation in the token")
        return token

    @property
    def login(self) -> str:
        """The password of user `id` at the enrolment listener. The secret does not follow from it."""
        return login_of(self.secret)


def login_of(secret: bytes) -> str:
    return hmac.new(secret, _LOGIN, hashlib.sha256).hexdigest()


def _checksum(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()[:_CHECK_BYTES]


class Enrolment(Struct, frozen=True, array_like=True, tag_field="type"):
    """Base of all messages about certificates."""


class JoinRequest(Enrolment, frozen=True, tag="join"):
    """A device with a token asks for its first certificate; sealed."""

    nonce: bytes  # of this attempt; the answer repeats it
    device: str
    request: bytes  # PKCS #10, DER: the device's public key, signed with its private one


class JoinGranted(Enrolment, frozen=True, tag="granted"):
    """The first certificate; sealed."""

    nonce: bytes
    device: str
    certificate: bytes  # DER
    authority: bytes  # DER; its SHA-256 is in the token


class JoinRefused(Enrolment, frozen=True, tag="denied"):
    """No certificate, and why; sealed. Asking again with this token does not help."""

    nonce: bytes
    reason: str


class RenewRequest(Enrolment, frozen=True, tag="renew"):
    """A device asks whether it is time for its next certificate: each time it connects, and again up to an hour later.

    The coordinator's clock decides; there is no answer while it is too early.
    """

    request: bytes  # as in JoinRequest
    authorities: Annotated[tuple[Digest, ...], Meta(max_length=MOST_AUTHORITIES)] = ()
    """SHA-256 of each authority that the device trusts; the first has issued its certificate. Empty: it cannot change
    its authority."""


class Renewed(Enrolment, frozen=True, tag="renewed"):
    """The next certificate for the key in the request.

    With `authority` it is from a new authority, and `endorsement` is the certificate in which the former one has signed
    the new one's key. A device trusts no other.
    """

    certificate: bytes  # DER
    authority: bytes = b""  # DER
    endorsement: bytes = b""  # DER


AnyEnrolment = JoinRequest | JoinGranted | JoinRefused | RenewRequest | Renewed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEnrolment] = msgspec.msgpack.Decoder(AnyEnrolment)
_VERSION = bytes([ENROLMENT_VERSION])


def encode_enrolment(message: RenewRequest | Renewed) -> bytes:
    return _check_size(_VERSION + _encoder.encode(message))


def decode_enrolment(raw: bytes) -> AnyEnrolment:
    """Undo `encode_enrolment`. Raises PeerRefused for another version, BadPayload for anything unreadable."""
    _check_head(raw, 1)
    return _decode(raw[1:])


def seal(message: AnyEnrolment, secret: bytes, direction: bytes) -> bytes:
    """Add an HMAC with the token's secret to a message; FROM_DEVICE or FROM_COORDINATOR."""
    body = _encoder.encode(message)
    return _check_size(_VERSION + _mac(body, secret, direction) + body)


def unseal(raw: bytes, secret: bytes, direction: bytes) -> AnyEnrolment:
    """Undo `seal`. Raises PeerRefused for another version, BadPayload when the seal is not right."""
    _check_head(raw, 1 + MAC_BYTES)
    mac, body = raw[1 : 1 + MAC_BYTES], raw[1 + MAC_BYTES :]
    if not hmac.compare_digest(mac, _mac(body, secret, direction)):
        raise BadPayload(
            "FV1307", f"a sealed message of {len(raw)} bytes was not written with the secret of this token"
        )
    return _decode(body)


def _mac(body: bytes, secret: bytes, direction: bytes) -> bytes:
    key = hmac.new(secret, direction, hashlib.sha256).digest()
    return hmac.new(key, _VERSION + body, hashlib.sha256).digest()


def _check_size(raw: bytes) -> bytes:
    if len(raw) > MAX_ENROLMENT_BYTES:
        raise BadPayload(
            "FV2301", f"an enrolment message of {len(raw)} bytes exceeds the limit of {MAX_ENROLMENT_BYTES} bytes"
        )
    return raw


def _check_head(raw: bytes, least_bytes: int) -> None:
    _check_size(raw)
    if raw and raw[0] != ENROLMENT_VERSION:
        raise PeerRefused(
            "FV1513", f"the other side speaks enrolment version {raw[0]}, this side version {ENROLMENT_VERSION}"
        )
    if len(raw) <= least_bytes:
        raise BadPayload("FV2301", f"an enrolment message of {len(raw)} bytes is too short")


def _decode(body: bytes) -> AnyEnrolment:
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadPayload("FV2301", f"an enrolment message of {len(body)} bytes cannot be read: {error}") from error
