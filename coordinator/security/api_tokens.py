"""Tokens of the HTTP API: who may do what, by a role.

A file in the folder of all runs holds their digests, readable by its owner only. A token is shown once, when it is
made.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from fedvit.errors import ConfigError, Damaged
from fedvit.files import atomic_write, hold_lock, storage_failed
from fedvit.wire.topics import check_name

FILE, LOCK = "api-tokens.json", "api-tokens.lock"
PREFIX = "fvt_"
"""Begins every token, so that tools that look for leaked secrets find it."""
MOST_TOKENS = 1000
LONGEST_DAYS = 36_500
"""Longest validity of a token that ends."""

UserRole = Literal["viewer", "operator", "admin"]
"""Rights, in ascending order: look at runs and devices; submit and control runs, label devices; everything."""
ROLES: tuple[UserRole, ...] = get_args(UserRole)


class ApiUser(NamedTuple):
    """Somebody who has been recognised."""

    name: str
    role: UserRole
    token_digest: str | None = None  # None: recognised without a token

    def may(self, least: UserRole) -> bool:
        """Return whether the role includes another one.

        >>> ApiUser("ci", "operator").may("viewer"), ApiUser("ci", "operator").may("admin")
        (True, False)
        """
        return ROLES.index(self.role) >= ROLES.index(least)


class ApiToken(Struct, frozen=True, kw_only=True):
    """A token, without its text."""

    name: str
    role: UserRole
    digest: str  # SHA-256 of the text, which is random
    made_at: str  # ISO 8601, UTC
    expires_at: str | None = None  # ISO 8601, UTC

    def is_expired(self) -> bool:
        return self.expires_at is not None and datetime.now(UTC) >= datetime.fromisoformat(self.expires_at)


class ApiTokens:
    """The tokens of a folder of runs. They are read again when the file has changed, so that a removed one ends."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / FILE
        self._stamp: tuple[int, int, int] | None = None
        self._known: list[ApiToken] = []

    def list_all(self) -> list[ApiToken]:
        """Return all tokens by name, expired ones too. Raises Damaged if the file cannot be read."""
        try:
            stat = self._file.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp != self._stamp:
                self._known = msgspec.json.decode(self._file.read_bytes(), type=list[ApiToken])
                self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._known = None, []
        except OSError as error:
            raise storage_failed(f"cannot read {self._file}", error) from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(
                "FV1642", f"{self._file} is damaged: {error}; remove it, and make the tokens again"
            ) from error
        return self._known

    def add(self, name: str, role: UserRole, valid_days: float | None = None) -> str:
        """Make a token; return its text. Raises ConfigError if the name is taken or invalid."""
        check_name(name, "name of the token")
        made = PREFIX + secrets.token_urlsafe(32)
        now = time.time()
        token = ApiToken(
            name=name,
            role=role,
            digest=_digest(made),
            made_at=_iso(now),
            expires_at=None if valid_days is None else _iso(now + 86_400 * valid_days),
        )
        with self._change() as tokens:
            if any(known.name == name for known in tokens):
                raise ConfigError("FV1643", f"there is a token called {name!r} already; remove it, or choose a name")
            if len(tokens) >= MOST_TOKENS:
                raise ConfigError("FV1643", f"there are {MOST_TOKENS} tokens: remove some")
            tokens.append(token)
        return made

    def remove(self, name: str) -> None:
        """Make a token invalid at once. Raises ConfigError if there is none of this name."""
        with self._change() as tokens:
            kept = [token for token in tokens if token.name != name]
            if len(kept) == len(tokens):
                names = ", ".join(token.name for token in tokens) or "none"
                raise ConfigError("FV1643", f"there is no token called {name!r}; there are: {names}")
            tokens[:] = kept

    def find(self, text: str) -> ApiUser | None:
        """Return who a token belongs to; None if it is unknown or has expired. The time taken does not depend on it."""
        digest, found = _digest(text), None
        for token in self.list_all():
            if hmac.compare_digest(token.digest.encode(), digest.encode()):
                found = token
        return ApiUser(found.name, found.role, found.digest) if found and not found.is_expired() else None

    def has(self, digest: str) -> bool:
        """Return whether the token with this digest is valid now; another one may have its name since."""
        return any(token.digest == digest and not token.is_expired() for token in self.list_all())

    @contextmanager
    def _change(self) -> Iterator[list[ApiToken]]:
        """Change the tokens; other processes wait."""
        with hold_lock(self._folder / LOCK):
            tokens = list(self.list_all())
            yield tokens
            tokens.sort(key=lambda token: token.name)
            atomic_write(self._file, msgspec.json.format(msgspec.json.encode(tokens)), private=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
