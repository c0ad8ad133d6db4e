"""The audit: who changed what, when, and from where. It is in the record, and for a deployment in its registry.

The digest of each entry covers that of the entry before it, so that a changed, removed or inserted entry is found.
Somebody who can write the database can compute all digests anew: keep the newest digest elsewhere, and compare.
"""

import getpass
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from sqlalchemy import MetaData, Table, delete, func, select, text
from sqlalchemy.engine import Connection

from coordinator.record.rows import read_rows, record_of
from coordinator.record.tables import AUDIT, AuditEntry, now
from fedvit.blobs import digest_of
from fedvit.errors import Damaged

if TYPE_CHECKING:
    from coordinator.record.database import Database

KEPT = 10_000
"""Newest entries that stay."""
SLACK = 500
"""Entries beyond KEPT after which the oldest are removed; an entry of its own then names the last that was."""
LONGEST = 2000
"""Characters of a text that are kept."""
TRIM = "trim"
FIRST = ""
"""Former digest of the first entry."""

_ENCODER = msgspec.json.Encoder(order="sorted")


class Actor(NamedTuple):
    """The person or program that changes something."""

    who: str
    origin: str  # the command line, or the API or the dashboard with the client's address


_ACTOR: ContextVar[Actor | None] = ContextVar("actor", default=None)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Name the actor of everything that this thread or task changes within the block."""
    token = _ACTOR.set(actor)
    try:
        yield
    finally:
        _ACTOR.reset(token)


def current_actor() -> Actor:
    """Return who acts now: by default the user of this process."""
    return _ACTOR.get() or Actor(f"{_user()}@{socket.gethostname()}", "command line")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"


def add_entry(connection: Connection, act: str, subject: str, details: str = "", *, table: Table = AUDIT) -> None:
    """Append an act of the current actor, in the caller's transaction; the oldest entries beyond KEPT are removed."""
    _lock(connection, table)
    last = _last(connection, table)
    first_id: int | None = connection.execute(select(func.min(table.c.id))).scalar()
    if last and last.id - int(first_id or 0) + 1 >= KEPT + SLACK:
        last = _trim(connection, table, last)
    _append(connection, table, last, act, subject, details)


def read_entries(connection: Connection, newest: int | None = None, *, table: Table = AUDIT) -> list[AuditEntry]:
    """Return the entries, or the newest of them, the oldest first."""
    if newest is None:
        return _read(connection, table)
    return _read(connection, table, newest=newest)[::-1]


def check_entries(entries: list[AuditEntry], expected: str | None = None) -> str:
    """Verify all entries of an audit; return the newest digest.

    Raises Damaged, naming the entry, if one was changed, removed or inserted, or if none has the `expected` digest.
    """
    trims = {entry.subject: entry.details for entry in entries if entry.act == TRIM}
    former, number = FIRST, 1
    if entries and entries[0].id != 1:
        former, number = trims.get(str(entries[0].id - 1), "missing"), entries[0].id
    for entry in entries:
        if (entry.id, entry.former, entry.digest) != (number, former, _digest(entry)):
            raise Damaged("FV1641", f"the audit was changed at entry {number}, or before it")
        former, number = entry.digest, number + 1
    if expected and expected not in {entry.digest for entry in entries}:
        raise Damaged("FV1641", f"the audit has no entry with digest {expected}: entries were removed or replaced")
    return former


def make_audit_table(tables: MetaData) -> Table:
    """Return the table of an audit in another database."""
    return AUDIT.to_metadata(tables)


def _lock(connection: Connection, table: Table) -> None:
    """Let no other process append until the transaction ends."""
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"LOCK TABLE {table.name} IN EXCLUSIVE MODE"))
        return
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:  # else it has written, and holds the lock
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _last(connection: Connection, table: Table) -> AuditEntry | None:
    return next(iter(_read(connection, table, newest=1)), None)


def _read(connection: Connection, table: Table, *where: Any, newest: int | None = None) -> list[AuditEntry]:
    order = table.c.id if newest is None else table.c.id.desc()
    query = select(table).where(*where).order_by(order).limit(newest)
    return [record_of(AuditEntry, row) for row in read_rows(connection, query)]


def _trim(connection: Connection, table: Table, last: AuditEntry) -> AuditEntry:
    """Remove the oldest entries beyond KEPT, and return the entry that names them."""
    oldest = last.id - KEPT + 1
    connection.execute(delete(table).where(table.c.id < oldest))
    first = _read(connection, table, table.c.id == oldest)[0]
    with acting_as(Actor("fedvit", "rule")):
        return _append(connection, table, last, TRIM, str(oldest - 1), first.former)


def _append(
    connection: Connection, table: Table, last: AuditEntry | None, act: str, subject: str, details: str
) -> AuditEntry:
    actor = current_actor()
    entry = AuditEntry(
        id=last.id + 1 if last else 1,
        at=now(),
        who=_clean(actor.who),
        origin=_clean(actor.origin),
        act=act,
        subject=_clean(subject),
        details=_clean(details),
        former=last.digest if last else FIRST,
        digest="",
    )
    entry = msgspec.structs.replace(entry, digest=_digest(entry))
    connection.execute(table.insert().values(**msgspec.structs.asdict(entry)))
    return entry


def _clean(words: str) -> str:
    """Return a text that every database stores: without a byte of 0, or bytes of a file name that are no text."""
    return words[:LONGEST].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _digest(entry: AuditEntry) -> str:
    return digest_of(_ENCODER.encode(msgspec.structs.replace(entry, digest="")))


class RecordedAudit:
    """The audit of a record."""

    def __init__(self, database: "Database") -> None:
        self._database = database

    def add(self, act: str, subject: str, details: str = "") -> None:
        """Append an act of the current actor; within `Database.together` it is stored with the act, or not at all."""
        with self._database.transaction() as connection:
            add_entry(connection, act, subject, details)

    def read(self, newest: int | None = None) -> list[AuditEntry]:
        """Return the entries, or the newest of them, the oldest first."""
        with self._database.transaction() as connection:
            return read_entries(connection, newest)
