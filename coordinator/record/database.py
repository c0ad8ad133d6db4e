"""The database of the record, SQLite or PostgreSQL: where it is, how it is opened, and what its errors mean."""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from sqlalchemy import Select, Table, create_engine, event, func, inspect, select, text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from coordinator.record.copies import is_whole, make_file_damaged_error, newest_copy
from coordinator.record.leadership import ServiceHost, check_term, fence, services_of
from coordinator.record.postgresql import address_of, engine_of, failure_of
from coordinator.record.rows import BrokenSeal, read_records, read_rows
from coordinator.record.schema import is_older, other_version, version_of
from coordinator.record.sqlite_errors import convert_error
from coordinator.record.tables import RUNS, SCHEMA, TABLES, from_json, to_json
from fedvit.errors import ConfigError, Damaged
from fedvit.files import atomic_write, name_failure
from fedvit.timings import Timings

_R = TypeVar("_R", bound=Struct)

DATABASE_FILE, ADDRESS_FILE = "fedvit.db", "record.url"
"""In the folder of all runs: the database of SQLite, or the address of another one."""

COPIED_ROWS = 1000
"""Rows that are in memory at once when a database is copied."""
_MIGRATING = 7_329_118_101
"""Key of the lock of PostgreSQL that a process holds while it makes or migrates tables."""


def use_database(folder: Path, url: str) -> None:
    """Keep the record of a folder of runs in a PostgreSQL database, whose address is written into the folder.

    Raises ConfigError if the folder's record is elsewhere already, or if the address is none of PostgreSQL;
    StorageFailed if the database does not answer.
    """
    address = address_of(url, "--record")
    shown = address.render_as_string()
    if (folder / DATABASE_FILE).exists():
        raise ConfigError(
            "FV1603",
            f"--record {shown}: {folder} has its record in {DATABASE_FILE}; use another folder with --runs, or leave "
            "out --record",
        )
    file = folder / ADDRESS_FILE
    if file.exists():
        known = address_of(_address_in(file), str(file))
        if known == address:
            return
        if known.set(password=None) != address.set(password=None):
            raise ConfigError(
                "FV1603",
                f"--record {shown}: the record of {folder} is in {known.render_as_string()}; use another folder with "
                "--runs",
            )
    Database(url, check=False).close()
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(file, f"{url}\n".encode(), private=True)


def address_in(folder: Path) -> str | None:
    """The address of the database with the record of a folder; None if it is a file. Raises StorageFailed."""
    file = folder / ADDRESS_FILE
    return _address_in(file) if file.exists() else None


def _address_in(file: Path) -> str:
    """Raise StorageFailed if the file cannot be read."""
    with name_failure(f"cannot read {file}"):
        return file.read_text().strip()


class Database:
    """An open database of the record, safe from any thread.

    Raises StorageFailed if the database cannot be read or written, NoRoom if disk space or descriptors are used up,
    or the database's server does not answer, Damaged, with what to do, if its content is damaged, ConfigError if a
    newer or an unknown version of this software wrote it.

    A database of an older schema is migrated. With `check` false the whole database is not verified first: for
    commands that only show it, and for those that call `check` themselves. With `reads_only` nothing is ever written:
    a database of an older schema raises ConfigError, too.
    """

    def __init__(self, url: str, *, folder: Path | None = None, check: bool = True, reads_only: bool = False) -> None:
        self.copied: TemporaryDirectory[str] | None = (
            None  # holds the database; it is removed when the database is closed
        )
        if url.startswith("sqlite:"):
            self._engine: Engine = create_engine(url, json_serializer=to_json, json_deserializer=from_json)
            self.file: Path | None = Path(self._engine.url.database or "")
        else:
            self._engine, self.file = engine_of(address_of(url, "record"), pool_pre_ping=True), None
        self.folder = self.file.parent if self.file else folder  # of all runs, where it is known
        self.term = 0  # 0: it need not lead to write
        self._joined = threading.local()
        self.commits = Timings()  # of transactions that wrote
        if self.file:
            event.listen(self._engine, "connect", _prepare_reading if reads_only else _prepare_sqlite)
            self._check_file(self.file, whole=check)
        with self.transaction() as connection:
            if (schema := version_of(connection)) != SCHEMA:
                if reads_only:
                    raise other_version(self._engine.url, schema)
                self._bring_up_to_date(connection)

    def _bring_up_to_date(self, connection: Connection) -> None:
        """Create the tables, or migrate those of an older schema, in one transaction."""
        if self.file:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # otherwise SQLite would commit each change of a table
        else:
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATING)))
        schema = version_of(connection)
        if (schema is None and not inspect(connection).has_table(RUNS.name)) or is_older(schema):
            migrations = import_module("coordinator.record.migrations")  # late: Alembic is rarely needed
            migrations.migrate(connection)
        elif schema != SCHEMA:  # otherwise another process has migrated it
            raise other_version(self._engine.url, schema)

    def _check_file(self, file: Path, *, whole: bool) -> None:
        """Check the file before it is used; `whole`: read all of it."""
        if not file.is_file():
            return
        if not file.stat().st_size:
            if newest_copy(file):  # otherwise a process was killed before it wrote anything
                raise self.make_damaged_error("it is empty")
            return
        if whole:
            self.check()

    @property
    def address(self) -> str:
        """Its URL, without the password."""
        return str(self._engine.url)

    def check(self) -> None:
        """Verify the whole database, in time proportional to its size. Raises Damaged. May run in its own thread."""
        if self.file:
            with self.transaction() as connection:
                found = connection.execute(text("PRAGMA integrity_check(1)")).scalar()
                if found != "ok":
                    raise self.make_damaged_error(str(found))

    def close(self) -> None:
        self._engine.dispose()
        if self.copied:
            self.copied.cleanup()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything that this thread writes within the block is one transaction."""
        with self.transaction() as connection:
            self._joined.connection = connection
            try:
                yield
            finally:
                del self._joined.connection

    def read(self, kind: type[_R], table: Table, query: Select[Any]) -> list[_R]:
        """Return the rows of a query as records."""
        with self.transaction() as connection:
            return list(read_records(connection, kind, table, query))

    def fetch(self, query: Select[Any]) -> list[Any]:
        """Return the rows of a query."""
        with self.transaction() as connection:
            return list(connection.execute(query))

    def fetch_value(self, query: Select[Any]) -> Any:
        """Return the first column of the first row of a query; None if there is no row."""
        with self.transaction() as connection:
            return connection.execute(query).scalar()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        if joined := getattr(self._joined, "connection", None):
            yield joined
            return
        try:
            with self._engine.begin() as connection:
                yield connection
                wrote = getattr(connection.connection.driver_connection, "in_transaction", True)
                began = time.perf_counter()
            if wrote:
                self.commits.add(time.perf_counter() - began)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if not self.file and isinstance(error, SQLAlchemyError) and (gone := failure_of(error, self._engine.url)):
                raise gone from error
            damaged = self.make_damaged_error if self.file else None
            raise convert_error(error, f"database {self._engine.url}", damaged) from error
        except BrokenSeal as error:
            raise self.make_damaged_error(str(error)) from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.make_damaged_error(f"a value cannot be read ({error})") from error

    def make_damaged_error(self, what: str, run: str | None = None) -> Damaged:
        """Make the error of a damaged record, with what to do: names the newest copy, or the newest that has `run`."""
        if self.file:
            return make_file_damaged_error(self.file, what, run)
        return Damaged("FV1621", f"database {self._engine.url} is damaged: {what}")

    def lead_in(self, term: int) -> None:
        """From now on raise LeadershipLost, and write nothing, when another process has taken over from the leader of
        this term."""
        self.term = term
        fence(self._engine, term)

    def check_leads(self) -> None:
        """Raise LeadershipLost if another process has taken over from this one, which led."""
        if self.term:
            with self.transaction() as connection:
                check_term(connection, self.term)

    def services(self) -> list[ServiceHost]:
        """Services that are connected to the database now, the leader first; none if it is a file."""
        if self.file:
            return []
        with self.transaction() as connection:
            return services_of(connection)

    def check_reachable(self) -> None:
        """Raise DatabaseGone if the database's server does not answer."""
        with self.transaction() as connection:
            connection.execute(select(1))

    def back_up(self, file: Path) -> None:
        """Write a verified copy of the database to `file`, a database of SQLite that must not exist. It is not synced.

        It holds what one moment held, also while others write.
        """
        if self.file:
            with self.transaction() as connection:
                raw: Any = connection.connection.driver_connection
                with closing(sqlite3.connect(file)) as copy:
                    try:
                        raw.backup(copy)
                    except sqlite3.Error as error:
                        raise convert_error(
                            error, f"cannot copy {self.file} to {file}", self.make_damaged_error
                        ) from error
        else:
            with closing(Database(f"sqlite:///{file}")) as copied:
                copied.fill_from(self)
        if not is_whole(file):
            raise self.make_damaged_error("a copy of it is not intact")

    def fill_from(self, other: "Database") -> None:
        """Copy all rows of another database into this one, which has none, in one transaction of each."""
        with other.transaction() as source, self.transaction() as target:
            if not other.file:  # so that all tables are of one moment
                source.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            for table in TABLES.sorted_tables:
                rows = read_rows(source, select(table))
                while piece := list(islice(rows, COPIED_ROWS)):
                    target.execute(table.insert(), piece)

    def compact(self) -> None:
        """Shrink the file by its unused space."""
        if self.file:
            with self.transaction() as connection:
                connection.exec_driver_sql("VACUUM")


def _prepare_reading(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a round that devices know of must survive a power cut
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
