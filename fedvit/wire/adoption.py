"""Messages by which a device gets its join token without a person who copies it, and the code that people compare.

It is numeric comparison as in Bluetooth (LE Secure Connections): both sides send a public key, and the coordinator
commits to its random number. Then the device reveals its number, and after it the coordinator. The code of six digits
follows from both keys and both numbers. A stranger who relays between both has two different keys, and must choose its
numbers before it knows the other side's: its two codes are equal once in a million attempts.

Bytes: 4 bytes of length, then msgpack of an array that begins with the tag.
"""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fedvit.errors import BadPayload, PeerRefused

ADOPTION_VERSION = 1
ADOPTION_PORT = 8886
SERVICE = "_fedvit-adopt._tcp.local."
"""Type of the service that a coordinator announces by mDNS while it may adopt devices."""
MAX_ADOPTION_BYTES = 16 * 1024
RANDOM_BYTES = 32
CODE_DIGITS = 6

Bytes32 = Annotated[bytes, Meta(min_length=RANDOM_BYTES, max_length=RANDOM_BYTES)]
Text = Annotated[str, Meta(max_length=200)]


class Adoption(Struct, frozen=True, array_like=True, tag_field="type"):
    """Base of all messages of an adoption."""


class AskAdoption(Adoption, frozen=True, tag="ask"):
    """A device asks to be adopted: the name that it wants, and its public key (X25519)."""

    version: int
    device: Text
    key: Bytes32


class OfferAdoption(Adoption, frozen=True, tag="offer"):
    """The coordinator's name for people, its public key, and the commitment to its number."""

    coordinator: Text
    key: Bytes32
    commitment: Bytes32


class RevealNumber(Adoption, frozen=True, tag="number"):
    """The random number of a side: first the device's, then the coordinator's."""

    number: Bytes32


class GrantToken(Adoption, frozen=True, tag="token"):
    """The join token, encrypted with the key that both have agreed on."""

    sealed: Annotated[bytes, Meta(max_length=MAX_ADOPTION_BYTES)]


class RefuseAdoption(Adoption, frozen=True, tag="refused"):
    """No adoption, and why."""

    reason: Text


AnyAdoption = AskAdoption | OfferAdoption | RevealNumber | GrantToken | RefuseAdoption

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyAdoption] = msgspec.msgpack.Decoder(AnyAdoption)


def encode_adoption(message: AnyAdoption) -> bytes:
    """Return the bytes of a message, without its length."""
    return _encoder.encode(message)


def decode_adoption(raw: bytes) -> AnyAdoption:
    """Undo `encode_adoption`. Raises BadPayload."""
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadPayload("FV2301", f"a message of an adoption ({len(raw)} bytes) cannot be read: {error}") from error


def check_version(ask: AskAdoption) -> None:
    """Raise PeerRefused for a device that speaks another version."""
    if ask.version != ADOPTION_VERSION:
        raise PeerRefused(
            "FV1513", f"the device speaks adoption version {ask.version}, this side version {ADOPTION_VERSION}"
        )


def commit(ask: AskAdoption, coordinator: str, key: bytes, number: bytes) -> bytes:
    """Return the coordinator's commitment to its number, for these keys and names."""
    return _hash(b"fedvit adoption: commitment", encode_adoption(ask), coordinator.encode(), key, number)


def make_transcript(ask: AskAdoption, offer: OfferAdoption, of_device: bytes, of_coordinator: bytes) -> bytes:
    """Return the digest of everything that both sides have seen, from which code and key follow.

    Raises PeerRefused if the coordinator's number is not the one that it has committed to.
    """
    if commit(ask, offer.coordinator, offer.key, of_coordinator) != offer.commitment:
        raise PeerRefused(
            "FV1341", "the coordinator changed its number after it saw this device's: somebody may relay; try again"
        )
    return _hash(
        b"fedvit adoption: transcript", encode_adoption(ask), encode_adoption(offer), of_device, of_coordinator
    )


def make_code(transcript: bytes) -> str:
    """Return the code that people compare.

    >>> make_code(bytes(32))
    '844 225'
    """
    number = int.from_bytes(_hash(b"fedvit adoption: code", transcript), "big") % 10**CODE_DIGITS
    digits = f"{number:0{CODE_DIGITS}d}"
    return f"{digits[:3]} {digits[3:]}"


def is_code(code: str, typed: str) -> bool:
    """Tell whether a person typed this code, with or without the space."""
    return "".join(typed.split()) == code.replace(" ", "")


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "big") + part)
    return digest.digest()
