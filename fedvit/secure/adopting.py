"""The secret of an adoption: both sides derive the same key from their key pairs and all that they have seen."""

import os

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedvit.errors import BadPayload
from fedvit.secure.keys import KEY_BYTES, KeyPair, seal, unseal
from fedvit.wire.adoption import RANDOM_BYTES

__all__ = ["make_key_pair", "make_number", "seal_token", "unseal_token"]


def make_key_pair() -> KeyPair:
    """Make a key pair for one attempt."""
    return KeyPair(os.urandom(KEY_BYTES))


def make_number() -> bytes:
    """Make a side's random number."""
    return os.urandom(RANDOM_BYTES)


def seal_token(pair: KeyPair, other: bytes, transcript: bytes, token: str) -> bytes:
    """Encrypt a token for the side with the public key `other`. Raises BadPayload for a key that is none."""
    return seal(_derive(pair, other, transcript), token.encode())


def unseal_token(pair: KeyPair, other: bytes, transcript: bytes, sealed: bytes) -> str:
    """Undo `seal_token`. Raises BadPayload."""
    try:
        return unseal(_derive(pair, other, transcript), sealed, "an adoption").decode("ascii")
    except (BadPayload, UnicodeDecodeError):
        raise BadPayload("FV1341", "the token of the coordinator is for another device; join again") from None


def _derive(pair: KeyPair, other: bytes, transcript: bytes) -> bytes:
    info = b"fedvit adoption: token\0" + transcript
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(pair.agree(other))
