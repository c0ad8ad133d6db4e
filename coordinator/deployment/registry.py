"""Which devices belong to a deployment, and which tokens may still make one: a file, changed under a lock."""

import base64
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, field

from fedvit.errors import ConfigError
from fedvit.files import atomic_write, storage_failed

FORGET_TOKENS_S = 30 * 86_400.0
"""So long a device that brings a used or expired token is told which of the two it is."""


class Certificate(Struct, frozen=True):
    """One that was issued; times are seconds since 1970 by this machine's clock."""

    serial: str  # hexadecimal: msgpack and JSON have no numbers of 160 bits
    issued_at: float
    expires_at: float


class Device(Struct):
    """A device that has joined."""

    name: str
    joined_at: float
    certificates: list[Certificate]
    last_seen: float | None = None  # when it connected last
    revoked_at: float | None = None
    misuses: int = 0  # of the broker, see coordinator.deployment.misuse

    @property
    def expires_at(self) -> float:
        return max(certificate.expires_at for certificate in self.certificates)


class OpenToken(Struct):
    """A token that was given out, and what became of it."""

    id: str
    device: str
    secret: str  # base64
    expires_at: float
    replaces: bool = False  # whatever has this name now is revoked when the token is used
    request: str | None = None  # SHA-256 of the request that used it up: its answer may have got lost
    certificate: str | None = None  # and the answer, DER in base64
    withdrawn: bool = False

    @property
    def secret_bytes(self) -> bytes:
        return base64.b64decode(self.secret)

    def is_open(self, now_s: float) -> bool:
        """Whether a device may still join with it."""
        return self.request is None and not self.withdrawn and self.expires_at > now_s


class Registry(Struct):
    """All devices and tokens. `generation` counts what a broker must read anew, `cuts` what must end connections."""

    devices: dict[str, Device] = field(default_factory=dict)
    tokens: dict[str, OpenToken] = field(default_factory=dict)
    revoked_serials: list[str] = field(default_factory=list)
    generation: int = 0
    cuts: int = 0

    def forget_old_tokens(self, now_s: float) -> None:
        self.tokens = {name: token for name, token in self.tokens.items() if token.expires_at > now_s - FORGET_TOKENS_S}


class RegistryFile:
    """The file; several processes may change it, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Registry:
        """Raises ConfigError when it is not there or not readable."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Registry)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} is damaged: {error}") from error

    def write(self, registry: Registry) -> None:
        atomic_write(self.path, msgspec.json.format(msgspec.json.encode(registry)), private=True)

    @contextmanager
    def locked(self) -> Iterator[Registry]:
        """The registry; nobody else changes it meanwhile. What the caller changes is written by `write`."""
        lock = self.path.with_suffix(".lock")
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise storage_failed(f"cannot lock {lock}", error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(handle)

    def stamp(self) -> tuple[int, int]:
        """Differs whenever the file was written anew."""
        found = self.path.stat()
        return found.st_mtime_ns, found.st_ino


def now() -> float:
    return time.time()
