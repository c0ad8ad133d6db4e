"""Encryption of personal tensors on disk, with a key of the device.

AES-256-GCM of the `cryptography` library: a changed byte, or a file that was moved within the vault, is detected. The
key is in a file that only its owner can read. With that file the vault can be read, so it belongs on another medium
than the vault, or on an encrypted one.
"""

import hashlib
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
        from cryptography.hazmat.primitives.ciphers.aead import (
            AESGCM,
        )  # imported late: a device without a key saves its memory

        if len(key) != _KEY_BYTES:
            raise ConfigError("FV1417", f"vault key {file} holds {len(key)} bytes, expected {_KEY_BYTES}")
        self.file = file
        self.features_key = hashlib.blake2b(b"features", key=key, digest_size=_KEY_BYTES).digest()
        """A key of its own for features: the process that runs graphs gets it, and not that of the vault."""
        self._cipher = AESGCM(key)

    @classmethod
    def load(cls, file: Path, *, make: bool) -> "VaultKey":
        """The key in a file; with `make` a missing file is created, readable by its owner only.

        Raises ConfigError when others can read it.
        """
        try:
            if make and not file.exists():
                cls(file, bytes(_KEY_BYTES))  # fails now if cryptography is missing
                atomic_write(file, secrets.token_bytes(_KEY_BYTES), private=True)
            mode = file.stat().st_mode & 0o777
            if mode & 0o077:
                raise ConfigError("FV1417", f"vault key {file} can be read by others (mode {mode:o}); chmod 600 {file}")
            return cls(file, file.read_bytes())
        except StorageFailed as error:
            raise ConfigError("FV1417", f"vault key: {error}") from error
        except OSError as error:
            raise ConfigError("FV1417", f"vault key {file} cannot be read: {error.strerror}") from error

    def seal(self, content: bytes, path_in_vault: str) -> bytes:
        """Encrypt content for a path of the vault, which is authenticated, too."""
        nonce = os.urandom(_NONCE_BYTES)
        return _MAGIC + nonce + self._cipher.encrypt(nonce, content, path_in_vault.encode())

    def open(self, sealed: bytes, path_in_vault: str) -> bytes:
        """Undo `seal`. Raises ConfigError for another key; nothing is changed then."""
        from cryptography.exceptions import InvalidTag

        body = sealed.removeprefix(_MAGIC)
        try:
            return bytes(self._cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], path_in_vault.encode()))
        except (InvalidTag, ValueError) as error:
            raise ConfigError(
                "FV1417",
                f"personal tensors of {path_in_vault} cannot be decrypted with key {self.file}: the key is another "
                "device's, or the file was changed; nothing was modified",
            ) from error
