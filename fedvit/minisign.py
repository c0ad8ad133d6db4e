"""Signatures of files in the format of minisign: Ed25519 over the file's BLAKE2b-512, with a signed comment.

`minisign -Vm FILE -P KEY` verifies what `sign` writes; `verify` also takes what minisign itself has signed.
"""

import base64
import binascii
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedvit.errors import ConfigError, PeerRefused
from fedvit.public_keys import KEY_BYTES, KEY_PREFIX, SIGNATURE_BYTES, PublicKey, format_key, parse_key

SUFFIX = ".minisig"
MAX_SIGNATURE_CHARACTERS = 4096
_WHOLE, _HASHED = b"Ed", b"ED"
"""Marks of keys and of signatures over whole files, and of signatures over hashes."""
_ID_BYTES = 8
_COMMENT, _SIGNED_COMMENT = "untrusted comment: ", "trusted comment: "


def format_minisign_key(key: PublicKey) -> str:
    """Return a public key as minisign's `-P` takes it."""
    public = parse_key(key)
    return base64.b64encode(_WHOLE + _find_id(public) + public).decode()


def parse_any_key(text: str) -> PublicKey:
    """Read a public key as text, ours (`ed25519:...`) or minisign's (`RW...`). Raises ConfigError."""
    if text.strip().startswith(KEY_PREFIX):
        return format_key(parse_key(text))
    try:
        raw = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != len(_WHOLE) + _ID_BYTES + KEY_BYTES or not raw.startswith(_WHOLE):
        raise ConfigError(
            "FV1467", f"{text[:80]!r} is no public key of releases: expected {KEY_PREFIX}... or RW... of minisign"
        )
    return format_key(raw[-KEY_BYTES:])


def sign(key: Ed25519PrivateKey, content: bytes, comment: str) -> str:
    """Return the signature file of a content; `comment` is one line, and signed, too."""
    public = key.public_key().public_bytes_raw()
    signature = key.sign(_hash(content))
    head = base64.b64encode(_HASHED + _find_id(public) + signature).decode()
    tail = base64.b64encode(key.sign(signature + comment.encode())).decode()
    return f"{_COMMENT}fedvit release key {format_key(public)}\n{head}\n{_SIGNED_COMMENT}{comment}\n{tail}\n"


def verify(key: PublicKey, content: bytes, signature_file: str, name: str) -> str:
    """Verify a content against its signature file; return the signed comment.

    Raises PeerRefused, naming the file `name`, for another key, a changed byte or an unreadable signature.
    """
    public = parse_key(key)
    lines = signature_file.splitlines()
    try:
        head, tail = (base64.b64decode(lines[row], validate=True) for row in (1, 3))
        comment = lines[2].removeprefix(_SIGNED_COMMENT)
        kind, signature = head[: len(_HASHED)], head[-SIGNATURE_BYTES:]
        if len(head) != len(_HASHED) + _ID_BYTES + SIGNATURE_BYTES or kind not in (_WHOLE, _HASHED):
            raise ValueError("it has another form")
    except (IndexError, ValueError) as error:
        raise PeerRefused(
            "FV1463", f"{name}{SUFFIX} is no signature of minisign ({error}); nothing of it is used"
        ) from None
    trusted = Ed25519PublicKey.from_public_bytes(public)
    try:
        trusted.verify(signature, content if kind == _WHOLE else _hash(content))
        trusted.verify(tail, signature + comment.encode())
    except InvalidSignature:
        raise PeerRefused(
            "FV1463",
            f"{name} is not signed by {key}, the key that this device trusts, or was changed since; nothing of it is "
            "used. Ask who publishes the releases",
        ) from None
    return comment


def _find_id(public: bytes) -> bytes:
    """Return the number by which minisign finds the key of a signature; here it follows from the key."""
    return hashlib.blake2b(public, digest_size=_ID_BYTES).digest()


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()
