"""Personal tensors at rest: sealed with a key of the device's own.

AES-256-GCM of the `cryptography` library: who changed a byte, or put a file into
another place of the vault, is found out. The key lies in a file that only its owner can read; whoever can read that
file can read the vault, so it belongs on another medium than the vault, or onto an encrypted one.
"""

import os
import secrets
from pathlib import Path

from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write

_MAGIC = b"fedvit sealed 1\n"
_KEY_BYTES = 32
_NONCE_BYTES = 12


class VaultKey:
    """One device's key. Raises ConfigError when it cannot be used."""

    def __init__(self, file: Path, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # megabytes that a device without a key saves

        if len(key) != _KEY_BYTES:
            raise ConfigError(f"vault key {file} holds {len(key)} bytes, expected {_KEY_BYTES}")
        self.file = file
        self._cipher = AESGCM(key)

    @classmethod
    def load(cls, file: Path, *, make: bool) -> "VaultKey":
        """The key in a file; with `make` a file that is not there is made, for its owner alone.

        Raises ConfigError when others can read it.
        """
        try:
            if make and not file.exists():
                cls(file, bytes(_KEY_BYTES))  # says now what is missing
                atomic_write(file, secrets.token_bytes(_KEY_BYTES), private=True)
            mode = file.stat().st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(f"vault key {file} can be read by others (mode {mode:o}); chmod 600 {file}")
            return cls(file, file.read_bytes())
        except StorageFailed as error:
            raise ConfigError(f"vault key: {error}") from error
        except OSError as error:
            raise ConfigError(f"vault key {file} cannot be read: {error.strerror}") from error

    def seal(self, content: bytes, place: str) -> bytes:
        """Encrypt what is to lie at a place of the vault."""
        nonce = os.urandom(_NONCE_BYTES)
        return _MAGIC + nonce + self._cipher.encrypt(nonce, content, place.encode())

    def open(self, sealed: bytes, place: str) -> bytes:
        """Undo `seal`. Raises ConfigError for another key; nothing is changed then."""
        from cryptography.exceptions import InvalidTag

        body = sealed.removeprefix(_MAGIC)
        try:
            return bytes(self._cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], place.encode()))
        except (InvalidTag, ValueError) as error:
            raise ConfigError(
                f"personal tensors of {place} do not open with key {self.file}: it is another device's, or they were "
                "changed; nothing was touched"
            ) from error
