"""The registry of a deployment's devices and tokens: a SQLite database.

A change is one transaction, and only touches the affected rows. Several processes may make changes: SQLite serialises
them. The database and SQLite's files beside it have mode 0600.
"""

import base64
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    bindparam,
    create_engine,
    delete,
    event,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from coordinator.record.audit import add_entry, read_entries
from coordinator.record.sqlite_errors import convert_error
from coordinator.record.tables import AuditEntry
from coordinator.security.registry_tables import AUDIT, CERTIFICATES, COUNTERS, DEVICES, REVOKED, TABLES, TOKENS
from fedvit.errors import ConfigError, Damaged
from fedvit.files import name_failure

FORGET_TOKENS_S = 30 * 86_400.0
"""Time for which used and expired tokens are remembered, so that a device learns which of the two its token is."""
LOCK_S = 30.0
"""Longest time that a change waits for those of other processes."""


class Certificate(Struct, frozen=True):
    """An issued certificate; times are seconds since 1970 by this machine's clock."""

    serial: str  # hexadecimal: SQLite and JSON have no numbers of 160 bits
    issued_at: float
    expires_at: float


class JoinedDevice(Struct, frozen=True):
    """A device that has joined."""

    name: str
    joined_at: float
    certificates: list[Certificate]
    last_seen: float | None = None  # a coordinator had a connection to it
    revoked_at: float | None = None
    misuses: int = 0  # of the broker, see coordinator.security.broker_log

    @property
    def expires_at(self) -> float:
        return max(certificate.expires_at for certificate in self.certificates)


class OpenToken(Struct, frozen=True):
    """An issued token and its use."""

    id: str
    device: str
    secret: str  # base64
    expires_at: float
    replaces: bool = False  # its use revokes the current device of this name
    request: str | None = None  # SHA-256 of the request that used it; repeated if the answer was lost
    certificate: str | None = None  # and the answer, DER in base64
    withdrawn: bool = False

    @property
    def secret_bytes(self) -> bytes:
        return base64.b64decode(self.secret)


class TokenRows:
    """The tokens of a registry, within one transaction.

    `new` and `has_forgotten` say how the broker's file of logins has to be written.
    """

    def __init__(self, rows: "Rows") -> None:
        self._rows = rows
        self._connection = rows.connection
        self.new: list[OpenToken] = []
        self.has_forgotten = False

    def find(self, token_id: str) -> OpenToken | None:
        return next(self._read(TOKENS.c.id == token_id), None)

    def read_all(self) -> list[OpenToken]:
        """Return all tokens that are remembered, including used and expired ones."""
        return list(self._read(TOKENS.c.id.is_not(None)))

    def read_open(self, now_s: float, device: str | None = None) -> list[OpenToken]:
        """Return the tokens with which any device, or the one of that name, can still join."""
        return list(self._read(_is_open(now_s) if device is None else _is_open(now_s) & (TOKENS.c.device == device)))

    def _read(self, which: ColumnElement[bool]) -> Iterator[OpenToken]:
        for row in self._connection.execute(select(TOKENS).where(which).order_by(TOKENS.c.expires_at)).mappings():
            yield OpenToken(**row)

    def add(self, token: OpenToken) -> None:
        self._connection.execute(insert(TOKENS).values(**msgspec.structs.asdict(token)))
        self._rows.raise_generation()
        self.new.append(token)

    def use(self, token_id: str, request: str, certificate: str) -> None:
        values = {"request": request, "certificate": certificate}
        self._connection.execute(update(TOKENS).where(TOKENS.c.id == token_id).values(**values))

    def withdraw(self, device: str) -> None:
        """Withdraw all unused tokens for this device."""
        unused = update(TOKENS).where(TOKENS.c.device == device, TOKENS.c.request.is_(None))
        self._connection.execute(unused.values(withdrawn=True))

    def withdraw_all(self) -> None:
        """Withdraw all tokens: they name an authority that is not trusted any more."""
        self._connection.execute(update(TOKENS).values(withdrawn=True, certificate=None))

    def forget(self, now_s: float) -> None:
        """Delete tokens that expired more than FORGET_TOKENS_S ago."""
        old = delete(TOKENS).where(TOKENS.c.expires_at <= now_s - FORGET_TOKENS_S)
        if self._connection.execute(old).rowcount:
            self.has_forgotten = True

    def remove(self, device: str) -> None:
        self._connection.execute(delete(TOKENS).where(TOKENS.c.device == device))
        self.has_forgotten = True


class RevocationRows:
    """The revocations of a registry, within one transaction.

    `has_changed` says whether the broker's list of revocations has to be written.
    """

    def __init__(self, rows: "Rows") -> None:
        self._rows = rows
        self._connection = rows.connection
        self.has_changed = False

    def list_devices(self) -> list[str]:
        query = select(DEVICES.c.name).where(DEVICES.c.revoked_at.is_not(None)).order_by(DEVICES.c.name)
        return list(self._connection.execute(query).scalars())

    def list_serials(self) -> list[str]:
        return list(self._connection.execute(select(REVOKED.c.serial)).scalars())

    def list_since(self, generation: int) -> list[str]:
        """Return the devices with a certificate that was revoked after this generation."""
        query = select(REVOKED.c.device).where(REVOKED.c.generation > generation).distinct()
        return list(self._connection.execute(query.order_by(REVOKED.c.device)).scalars())

    def revoke(self, name: str, when_s: float) -> None:
        """Revoke a device: all its certificates, and its name at the broker."""
        self._connection.execute(update(DEVICES).where(DEVICES.c.name == name).values(revoked_at=when_s))
        self.revoke_certificates(name)

    def revoke_certificates(self, name: str) -> None:
        """Revoke the current certificates of a device."""
        query = select(CERTIFICATES.c.serial).where(CERTIFICATES.c.device == name)
        self.revoke_serials(name, list(self._connection.execute(query).scalars()))

    def revoke_serials(self, name: str, serials: Iterable[str]) -> None:
        """Revoke these certificates, which were issued for `name`."""
        generation = self._rows.raise_generation()
        for serial in serials:
            added = insert(REVOKED).values(serial=serial, device=name, generation=generation)
            again = added.on_conflict_do_update(index_elements=["serial"], set_={"generation": generation})
            self._connection.execute(again)
        self.has_changed = True


class Rows:
    """The registry within one transaction; only within `Registry.change` may it be changed."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.tokens = TokenRows(self)
        self.revocations = RevocationRows(self)

    def generation(self) -> int:
        generation: int = self.connection.execute(select(COUNTERS.c.generation)).scalar_one()
        return generation

    def raise_generation(self) -> int:
        """Count a change of a file that the broker reads; return the new generation."""
        self.connection.execute(update(COUNTERS).values(generation=COUNTERS.c.generation + 1))
        return self.generation()

    def clock_s(self) -> float:
        """Return the newest date at which this machine's clock was plausible."""
        clock_s: float = self.connection.execute(select(COUNTERS.c.clock_s)).scalar_one()
        return clock_s

    def set_clock(self, when_s: float) -> None:
        self.connection.execute(update(COUNTERS).values(clock_s=when_s))

    def add_audit(self, act: str, subject: str, details: str = "") -> None:
        """Append an act of the current actor to the audit of the deployment."""
        AUDIT.create(self.connection, checkfirst=True)  # a registry of earlier software has none
        add_entry(self.connection, act, subject, details, table=AUDIT)

    def read_audit(self, newest: int | None = None) -> list[AuditEntry]:
        """Return the entries of the audit, or the newest of them, the oldest first."""
        has_audit = inspect(self.connection).has_table(AUDIT.name)
        return read_entries(self.connection, newest, table=AUDIT) if has_audit else []

    # --- devices --------------------------------------------------------------------------------------

    def find_device(self, name: str) -> JoinedDevice | None:
        return next(iter(self._read_devices(DEVICES.c.name == name, CERTIFICATES.c.device == name)), None)

    def read_devices(self) -> list[JoinedDevice]:
        """Return all devices, by name."""
        return self._read_devices(DEVICES.c.name.is_not(None), CERTIFICATES.c.device.is_not(None))

    def _read_devices(
        self, of_devices: ColumnElement[bool], of_certificates: ColumnElement[bool]
    ) -> list[JoinedDevice]:
        certificates: dict[str, list[Certificate]] = {}
        query = select(CERTIFICATES).where(of_certificates).order_by(CERTIFICATES.c.issued_at)
        for row in self.connection.execute(query).mappings():
            entry = Certificate(row["serial"], row["issued_at"], row["expires_at"])
            certificates.setdefault(row["device"], []).append(entry)
        devices = select(DEVICES).where(of_devices).order_by(DEVICES.c.name)
        return [
            JoinedDevice(certificates=certificates.get(row["name"], []), **row)
            for row in self.connection.execute(devices).mappings()
        ]

    def put_device(self, name: str, certificate: Certificate, when_s: float) -> None:
        """Add a device that has joined; replaces one of the same name."""
        self.remove_device(name)
        values = {"name": name, "joined_at": when_s, "last_seen": when_s, "misuses": 0}
        self.connection.execute(insert(DEVICES).values(**values))
        self.add_certificate(name, certificate)

    def remove_device(self, name: str) -> None:
        self.connection.execute(delete(CERTIFICATES).where(CERTIFICATES.c.device == name))
        self.connection.execute(delete(DEVICES).where(DEVICES.c.name == name))

    def add_certificate(self, name: str, certificate: Certificate) -> None:
        self.connection.execute(insert(CERTIFICATES).values(device=name, **msgspec.structs.asdict(certificate)))

    def drop_expired(self, name: str, now_s: float) -> None:
        """Forget the certificates of a device that have expired."""
        of_device = CERTIFICATES.c.device == name
        self.connection.execute(delete(CERTIFICATES).where(of_device, CERTIFICATES.c.expires_at <= now_s))

    def note_seen(self, seen: Mapping[str, float]) -> None:
        query = update(DEVICES).where(DEVICES.c.name == bindparam("of")).values(last_seen=bindparam("at"))
        if seen:
            self.connection.execute(query, [{"of": name, "at": when_s} for name, when_s in seen.items()])

    def count_misuse(self, name: str) -> None:
        self.connection.execute(update(DEVICES).where(DEVICES.c.name == name).values(misuses=DEVICES.c.misuses + 1))


class Registry:
    """The database at `path`.

    Raises ConfigError if it is missing, Damaged, with what to do, if its content is damaged, StorageFailed if it cannot
    be read or written, NoRoom if disk space or descriptors are used up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine: Engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": LOCK_S})
        event.listen(self._engine, "connect", _prepare)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Rows]:
        """Read a consistent snapshot of the rows."""
        with self._transaction("BEGIN") as connection:
            yield Rows(connection)

    @contextmanager
    def change(self) -> Iterator[Rows]:
        """Change the rows in one transaction, which is rolled back if the caller raises. Other processes wait."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield Rows(connection)

    def generation(self) -> int:
        with self.read() as rows:
            return rows.generation()

    def check(self) -> None:
        """Verify the whole database. Raises Damaged."""
        with self._transaction("BEGIN") as connection:
            verdict = connection.execute(text("PRAGMA quick_check(1)")).scalar()
            if verdict != "ok":
                raise self._make_damaged_error(" ".join(str(verdict).split()))

    def create(self) -> None:
        """Create the database and its tables."""
        with name_failure(f"cannot make {self.path}"):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        with self._transaction("BEGIN IMMEDIATE") as connection:
            TABLES.create_all(connection)
            connection.execute(insert(COUNTERS).values(generation=0, clock_s=now()))

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        if not self.path.is_file():  # SQLite would create an empty one
            raise ConfigError("FV1315", f"{self.path} is missing: it holds the deployment's devices; {_REMEDY}")
        try:
            with self._engine.begin() as connection:
                connection.exec_driver_sql(begin)
                yield connection
        except (SQLAlchemyError, sqlite3.Error) as error:
            place = f"the deployment's registry {self.path}"
            raise convert_error(error, place, self._make_damaged_error) from error

    def _make_damaged_error(self, what: str) -> Damaged:
        return Damaged("FV1315", f"the deployment's registry {self.path} is damaged: {what}; {_REMEDY}")


_REMEDY = (
    "put back a copy of it (devices that joined since then stay valid, and cannot be revoked); without a copy make a "
    "new deployment (coordinator init) and let each device join again"
)


def _is_open(now_s: float) -> ColumnElement[bool]:
    return TOKENS.c.request.is_(None) & ~TOKENS.c.withdrawn & (TOKENS.c.expires_at > now_s)


def _prepare(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # an answer to a device must survive a power cut
    cursor.close()


def now() -> float:
    return time.time()
