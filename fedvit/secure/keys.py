"""Keys of a sum: X25519 pairs, keys that two devices agree on, sealed messages, and streams of masks."""

import hashlib
from collections.abc import Iterator
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
_BLOCK_BYTES = 1 << 20


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


def find_public_key(secret: bytes) -> bytes:
    """Return the X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes) -> bytes:
    """Return what two devices have in common, each with its private and the other's public key. Raises BadPayload."""
    try:
        return X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise BadPayload("FV2312", f"a key of a sum cannot be used: {error}") from error


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypt the only message of a key (ChaCha20-Poly1305)."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, None)


def unseal(key: bytes, sealed: bytes, sender: str) -> bytes:
    """Undo `seal`. Raises BadPayload for another key, or a changed message."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, None)
    except InvalidTag:
        raise BadPayload("FV2312", f"the shares of {sender} are not for this sum, or were changed") from None


def stream_mask(key: bytes, size_bytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a key's ChaCha20 stream, in blocks of 1 MiB; the last one may be shorter."""
    encryptor = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = bytes(min(_BLOCK_BYTES, size_bytes))
    for first in range(0, size_bytes, _BLOCK_BYTES):
        yield encryptor.update(zeros[: min(_BLOCK_BYTES, size_bytes - first)])
