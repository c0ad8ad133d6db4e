"""Keys of a sum: X25519 pairs, keys that two devices agree on, sealed messages, and streams of masks."""

import hashlib
from functools import cached_property
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedvit.errors import BadPayload
from fedvit.wire.messages import SumId, SumTerms

KEY_BYTES = 32
_NONCE = bytes(12)
"""Each key seals one message, so that the nonce need not differ."""
_ZEROS = memoryview(bytes(1 << 17))


class Binding(NamedTuple):
    """The sum that keys are for: keys of another deployment, run, round, attempt, form or roster differ."""

    context: bytes

    @classmethod
    def of(cls, authority: bytes, sum_id: SumId, terms: SumTerms, roster: bytes) -> "Binding":
        """`authority`: digest of the deployment's certificate authority; `roster`: digest of the devices."""
        parts = [
            authority, sum_id.run.encode(), str(sum_id.round).encode(), sum_id.kind.encode(),
            str(sum_id.attempt).encode(), msgspec.msgpack.encode(terms), roster,
        ]  # fmt: skip
        digest = hashlib.sha256(b"fedvit sum 1")
        for part in parts:
            digest.update(len(part).to_bytes(4, "big") + part)
        return cls(digest.digest())

    def derive(self, secret: bytes, purpose: str, *names: str) -> bytes:
        """Derive a key of 32 bytes by HKDF-SHA256 for a purpose between devices."""
        info = b"\0".join([self.context, purpose.encode(), *(name.encode() for name in names)])
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


class KeyPair:
    """An X25519 key. It keeps what it has agreed on, as each agreement takes as long as 100 kB of masks."""

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self._agreed: dict[bytes, bytes] = {}

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return what this key and the public key of another device have in common. Raises BadPayload."""
        if public not in self._agreed:
            try:
                self._agreed[public] = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError as error:
                raise BadPayload("FV2312", f"a key of a sum cannot be used: {error}") from error
        return self._agreed[public]


def agree(secret: bytes, public: bytes) -> bytes:
    """Return what two devices have in common, each with its private and the other's public key. Raises BadPayload."""
    return KeyPair(secret).agree(public)


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypt the only message of a key (ChaCha20-Poly1305)."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, None)


def unseal(key: bytes, sealed: bytes, sender: str) -> bytes:
    """Undo `seal`. Raises BadPayload for another key, or a changed message."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise BadPayload("FV2312", f"the shares of {sender} are not for this sum, or were changed") from None


class MaskStream:
    """The ChaCha20 stream of a key (RFC 8439), read in pieces of any size."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def read_into(self, target: memoryview) -> None:
        """Read the next bytes into memory of the caller, since new memory for each piece would take longer."""
        for first in range(0, len(target), len(_ZEROS)):
            piece = target[first : first + len(_ZEROS)]
            self._encryptor.update_into(_ZEROS[: len(piece)], piece)

    def read(self, size_bytes: int) -> bytes:
        """Return the next bytes."""
        content = bytearray(size_bytes)
        self.read_into(memoryview(content))
        return bytes(content)
