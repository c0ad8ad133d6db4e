"""The keys of publishers: Ed25519 (RFC 8032), from the library cryptography."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fedvit import minisign
from fedvit.errors import ConfigError
from fedvit.files import atomic_write, name_failure
from fedvit.known_graphs import SignedGraphs, read_signatures, write_signatures
from fedvit.public_keys import PublicKey, format_key, parse_key

_PURPOSE = b"fedvit graph 1\0"
"""The beginning of everything that is signed, so that no signature of another use of the key counts."""


class PublisherKey:
    """A publisher's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public: PublicKey = format_key(key.public_key().public_bytes_raw())

    @classmethod
    def create(cls, file: Path) -> "PublisherKey":
        """Make a key, in a file that only its owner can read. Raises ConfigError if the file exists, StorageFailed."""
        if file.exists():
            raise ConfigError("FV1319", f"{file} exists already and is not changed")
        key = Ed25519PrivateKey.generate()
        atomic_write(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), private=True)
        return cls(key)

    @classmethod
    def read(cls, file: Path) -> "PublisherKey":
        """Read a key. Raises ConfigError, naming the file."""
        try:
            key = load_pem_private_key(file.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError("FV1319", f"the publisher's key {file} cannot be read: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError("FV1319", f"{file} is not a publisher's key: it is no Ed25519 key")
        return cls(key)

    def sign(self, digest: str) -> bytes:
        """Return the signature of a graph's digest."""
        return self._key.sign(_PURPOSE + digest.encode())

    def sign_file(self, content: bytes, comment: str) -> str:
        """Return minisign's signature file of a content, with a comment of one line."""
        return minisign.sign(self._key, content, comment)


def is_signed_by(publisher: PublicKey, digest: str, signature: bytes) -> bool:
    """Tell whether a publisher signed a graph. Raises ConfigError for a key that is none."""
    try:
        Ed25519PublicKey.from_public_bytes(parse_key(publisher)).verify(signature, _PURPOSE + digest.encode())
    except InvalidSignature:
        return False
    return True


def add_signatures(file: Path, key: PublisherKey, digests: Iterable[str]) -> int:
    """Sign graphs and add the signatures to a file; return how many are new.

    Raises ConfigError if the file holds signatures of another publisher, or cannot be read; StorageFailed.
    """
    with _hold_lock(file):
        signed = read_signatures(file) or SignedGraphs(key.public, {})
        if signed.publisher != key.public:
            raise ConfigError(
                "FV1320",
                f"{file} holds signatures of publisher {signed.publisher}, and this key is {key.public}: "
                "use the key of the first, or another file",
            )
        added = {digest: key.sign(digest) for digest in digests if digest not in signed.signatures}
        write_signatures(file, SignedGraphs(key.public, signed.signatures | added))
    return len(added)


@contextmanager
def _hold_lock(file: Path) -> Iterator[None]:
    """Keep other threads and processes from changing a file of signatures. Raises StorageFailed."""
    with name_failure(f"cannot open folder {file.parent}"):
        handle = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
