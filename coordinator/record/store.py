"""The record: runs, rounds and results in SQL, written before anything that depends on them is sent.

SQLite by default (write-ahead log, synced at commit), or PostgreSQL, whose address then stands in a file of the folder
of runs. Tensors are blobs; the record holds their digests. The time of a round's queries depends on the number of its
devices and not on that of earlier rounds: totals of rounds and devices are computed when a round is closed and
evaluated.
"""

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct
from sqlalchemy import (
    JSON,
    ColumnElement,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from coordinator.record import totals
from coordinator.record.leadership import ServiceHost, check_term, fence, services_of
from coordinator.record.postgresql import address_of, engine_of, failure_of
from coordinator.record.schema import is_newer, other_version, version_of
from coordinator.record.tables import (
    DEVICES,
    ENDED,
    EXPECTATIONS,
    LABELS,
    LOGS,
    QUARANTINES,
    REFUSALS,
    RESULTS,
    ROUNDS,
    RUNS,
    SCHEMA,
    SEAL,
    STRIKES,
    TABLES,
    TASKS,
    VERSION,
    Asked,
    DeviceLog,
    DeviceRecord,
    DeviceTotals,
    QuarantineRecord,
    RefusalRecord,
    ResultRecord,
    RoundRecord,
    RoundTotals,
    RunRecord,
    RunStatus,
    SavedState,
    StrikeRecord,
    TaskRecord,
    TaskTimes,
    from_json,
    to_json,
)
from fedvit.blobs import digest_of
from fedvit.choices import did_you_mean
from fedvit.descriptors import are_used_up, how_many
from fedvit.errors import ConfigError, Damaged, DiskFull, StorageFailed, TooManyOpenFiles
from fedvit.files import atomic_write, storage_failed
from fedvit.resources import BudgetKind, ResourceUse
from fedvit.timings import Timings
from fedvit.wire.messages import Result, TaskKind
from profiles.prediction import Expected

LOGS_KEPT = 20
"""Logs of one device in one run that are kept: more would let the device fill the disk."""
COPIES = "backups"
"""In a run's folder: copies of the database."""

DATABASE_FILE, ADDRESS_FILE = "fedvit.db", "record.url"
"""In the folder of all runs: the database of SQLite, or the address of another one."""

_R = TypeVar("_R", bound=Struct)


class ClosedRound(NamedTuple):
    """A closed round as `show` reads it."""

    round: int
    totals: RoundTotals
    figures: dict[str, float]


class StrikeCount(NamedTuple):
    """The strikes of one device."""

    ever: int
    unspent: int  # since its last quarantine


class RefusalCount(NamedTuple):
    """Equal refusals."""

    kind: str
    reason: str
    lost: bool  # nothing arrived
    times: int
    devices: int
    newest: str  # ISO 8601, UTC


class TaskHistory(NamedTuple):
    """A training task and its end."""

    round: int
    device: str
    asked_at: str  # ISO 8601, UTC; of the newest attempt
    attempt: int
    outcome: str | None  # an end of `TaskState`; None: under way
    expected: Expected | None
    received_at: str | None  # of its accepted result
    used_in: int | None
    use: ResourceUse | None
    times: TaskTimes


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_SORTING_ENCODER = msgspec.json.Encoder(order="sorted")

_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
"""Errors of SQLite when a write finds no space; the second also for a limit on file sizes."""


_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS")
"""Prefixes of SQLite's error names for a damaged file."""

_MIGRATING = 7_329_118_101
"""Key of the lock of PostgreSQL that a process holds while it makes or migrates tables."""

_FOREIGN = ("Could not decode to UTF-8", "no such table", "no such column")
"""Prefixes of SQLite's messages that also mean a damaged file."""


def use_database(folder: Path, url: str) -> None:
    """Keep the record of a folder of runs in a PostgreSQL database, whose address is written into the folder.

    Raises ConfigError if the folder's record is elsewhere already, or if the address is none of PostgreSQL;
    StorageFailed if the database does not answer.
    """
    address = address_of(url, "--record")
    shown = address.render_as_string()
    if (folder / DATABASE_FILE).exists():
        raise ConfigError(
            f"--record {shown}: {folder} has its record in {DATABASE_FILE}; use another folder with --runs, or leave "
            "out --record"
        )
    file = folder / ADDRESS_FILE
    if file.exists():
        known = address_of(_address_in(file), str(file))
        if known == address:
            return
        if known.set(password=None) != address.set(password=None):
            raise ConfigError(
                f"--record {shown}: the record of {folder} is in {known.render_as_string()}; use another folder with "
                "--runs"
            )
    Store(url, check=False).close()
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(file, f"{url}\n".encode(), private=True)


def address_in(folder: Path) -> str | None:
    """The address of the database with the record of a folder; None if it is a file. Raises StorageFailed."""
    file = folder / ADDRESS_FILE
    return _address_in(file) if file.exists() else None


def _address_in(file: Path) -> str:
    """Raises StorageFailed if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError as error:
        raise storage_failed(f"cannot read {file}", error) from error


class Store:
    """Raises StorageFailed if the database cannot be read or written, NoRoom if disk space or descriptors are used up,
    or the database's server does not answer, Damaged, with what to do, if its content is damaged, ConfigError if a
    newer version of this software wrote it.

    A database of an older version is migrated. With `check` false the whole database is not verified first: for
    commands that only show it, and for those that call `check` themselves. With `reads_only` nothing is ever written:
    a database of an older version raises ConfigError, too.
    """

    def __init__(self, url: str, *, check: bool = True, reads_only: bool = False) -> None:
        self._copied: TemporaryDirectory[str] | None = None
        if url.startswith("sqlite:"):
            self._engine: Engine = create_engine(url, json_serializer=to_json, json_deserializer=from_json)
            self._file: Path | None = Path(self._engine.url.database or "")
        else:
            self._engine, self._file = engine_of(address_of(url, "record"), pool_pre_ping=True), None
        self._term = 0  # 0: it need not lead to write
        self._joined = threading.local()
        self.commits = Timings()  # of transactions that wrote
        if self._file:
            event.listen(self._engine, "connect", _prepare_reading if reads_only else _prepare_sqlite)
            self._check_file(self._file, whole=check)
        with self._transaction() as connection:
            if (schema := version_of(connection)) != SCHEMA:
                if reads_only:
                    raise other_version(self._engine.url, schema)
                self._bring_up_to_date(connection)
        # SQLite does not notice a lost journal
        if self._file and not self.runs() and newest_copy(self._file):
            raise self.damaged("it holds no run")

    def _bring_up_to_date(self, connection: Connection) -> None:
        """Create the tables, or migrate those of an older version, in one transaction."""
        if self._file:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # otherwise SQLite would commit each change of a table
        else:
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATING)))
        schema = version_of(connection)
        if schema is None and not inspect(connection).has_table(RUNS.name):
            TABLES.create_all(connection)
            VERSION.create(connection)
            connection.execute(VERSION.insert().values(version_num=SCHEMA))
            return
        if is_newer(schema):
            raise other_version(self._engine.url, schema)
        if schema == SCHEMA:  # another process has migrated it
            return
        from coordinator.record.migrations import migrate  # imports Alembic, which is rarely needed

        migrate(connection)
        if schema is not None and schema >= "0002":  # it has totals
            return
        closed = select(ROUNDS.c.run, ROUNDS.c.round, ROUNDS.c.evaluated).where(ROUNDS.c.closed_at.is_not(None))
        for run, number, evaluated in connection.execute(closed.order_by(ROUNDS.c.run, ROUNDS.c.round)).all():
            self._sum_up_training(connection, run, number)
            if evaluated:
                self._sum_up_evaluation(connection, run, number)
        broke = select(REFUSALS.c.run, REFUSALS.c.device, REFUSALS.c.broke).where(REFUSALS.c.broke.is_not(None))
        for run, device, kind in connection.execute(broke).all():
            self._add_broken(connection, run, device, kind)

    def _check_file(self, file: Path, *, whole: bool) -> None:
        """Check the file before it is used; `whole`: read all of it."""
        if not file.is_file():
            return
        if not file.stat().st_size:
            if newest_copy(file):  # otherwise a process was killed before it wrote anything
                raise self.damaged("it is empty")
            return
        if whole:
            self.check()

    def check(self) -> None:
        """Verify the whole database, in time proportional to its size. Raises Damaged. May run in its own thread."""
        if self._file:
            with self._transaction() as connection:
                found = connection.execute(text("PRAGMA integrity_check(1)")).scalar()
                if found != "ok":
                    raise self.damaged(str(found))

    @classmethod
    def in_folder(cls, folder: Path, *, check: bool = True) -> "Store":
        """The record of a folder of runs; made if there is none."""
        if (file := folder / ADDRESS_FILE).exists():
            return cls(_address_in(file), check=check)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run folder {folder} cannot be made: {error.strerror}") from error
        return cls(f"sqlite:///{folder / DATABASE_FILE}", check=check)

    @classmethod
    def to_read(cls, folder: Path) -> "Store":
        """The existing record of a folder, for a process that never writes it."""
        if (file := folder / ADDRESS_FILE).exists():
            return cls(_address_in(file), check=False, reads_only=True)
        return cls(f"sqlite:///{folder / DATABASE_FILE}", check=False, reads_only=True)

    @classmethod
    def copy_of(cls, folder: Path) -> "Store":
        """A temporary copy of the record of a folder that this user cannot write: SQLite writes beside the database.

        Raises StorageFailed if the record cannot be read.
        """
        copied = TemporaryDirectory(prefix="fedvit-")
        try:
            for file in (folder / DATABASE_FILE, folder / f"{DATABASE_FILE}-wal"):
                if file.exists():
                    shutil.copyfile(file, Path(copied.name) / file.name)
        except OSError as error:
            raise storage_failed(f"cannot read {folder / DATABASE_FILE}", error) from error
        store = cls.in_folder(Path(copied.name), check=False)
        store._copied = copied
        return store

    def close(self) -> None:
        self._engine.dispose()
        if self._copied:
            self._copied.cleanup()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Everything that this thread writes within the block is one transaction."""
        with self._transaction() as connection:
            self._joined.connection = connection
            try:
                yield
            finally:
                del self._joined.connection

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
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
            cause = getattr(error, "orig", None) or error
            if not self._file and isinstance(error, SQLAlchemyError) and (gone := failure_of(error, self._engine.url)):
                raise gone from error
            name = getattr(cause, "sqlite_errorname", None) or ""
            if self._file and (name.startswith(_DAMAGED) or str(cause).startswith(_FOREIGN)):
                raise self.damaged(str(cause)) from error
            if are_used_up():  # SQLite only reports that it cannot open a file
                raise TooManyOpenFiles(f"database {self._engine.url}: {cause}; {how_many()}") from error
            kind = DiskFull if name in _FULL else StorageFailed
            raise kind(f"database {self._engine.url}: {cause}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.damaged(f"a value cannot be read ({error})") from error

    def damaged(self, what: str, run: str = "*") -> Damaged:
        """The error of a damaged record, with what to do: names the newest copy of any run, or of `run`."""
        return Damaged(
            remedy(self._file, what, run) if self._file else f"database {self._engine.url} is damaged: {what}"
        )

    def _records(
        self, connection: Connection, kind: type[_R], table: Table, query: Select[Any] | None = None
    ) -> Iterator[_R]:
        """The rows of a query as records. Raises Damaged if a row's seal does not match."""
        for row in _rows(connection, select(table) if query is None else query):
            if row.get(SEAL) not in (None, _seal_of(table, row)):  # older versions wrote no seals
                raise self.damaged(f"the seal of a row of table {table.name!r} is broken")
            yield _record(kind, row)

    def lead_in(self, term: int) -> None:
        """From now on raise LeadershipLost, and write nothing, when another process has taken over from the leader of
        this term."""
        self._term = term
        fence(self._engine, term)

    def check_leads(self) -> None:
        """Raises LeadershipLost if another process has taken over from this one, which led."""
        if self._term:
            with self._transaction() as connection:
                check_term(connection, self._term)

    def services(self) -> list[ServiceHost]:
        """Services that are connected to the database now, the leader first; none if it is a file."""
        if self._file:
            return []
        with self._transaction() as connection:
            return services_of(connection)

    def check_reachable(self) -> None:
        """Raises DatabaseGone if the database's server does not answer."""
        with self._transaction() as connection:
            connection.execute(select(1))

    @property
    def is_file(self) -> bool:
        """Whether the database is a file, of which there are copies in the folders of runs."""
        return self._file is not None

    def back_up(self, file: Path) -> None:
        """Write a verified copy of the database, which is a file, to `file`, which must not exist. It is not synced."""
        with self._transaction() as connection:
            raw: Any = connection.connection.driver_connection
            with closing(sqlite3.connect(file)) as copy:
                raw.backup(copy)
        if not is_whole(file):
            raise self.damaged("a copy of it is not intact")

    # --- runs -----------------------------------------------------------------------------------------

    def create_run(self, run: str, config: dict[str, Any], broker: dict[str, Any] | None = None) -> None:
        """Add a run that begins now."""
        with self._transaction() as connection:
            _insert(connection, RUNS, [RunRecord(run, now(), "waiting", config, broker=broker or {})])

    def submit_run(self, run: str, config: dict[str, Any]) -> None:
        """Add a run to the queue of a service."""
        at = now()
        with self._transaction() as connection:
            _insert(connection, RUNS, [RunRecord(run, at, "queued", config, submitted_at=at)])

    def submitted(self) -> list[RunRecord]:
        """Runs of a service that have not ended: those that have begun, then the queue, in order of submission."""
        waiting = select(RUNS).where(
            RUNS.c.submitted_at.is_not(None), RUNS.c.status.in_(("queued", "waiting", "running", "interrupted"))
        )
        order = (RUNS.c.status == "queued", RUNS.c.submitted_at, RUNS.c.id)
        with self._transaction() as connection:
            return list(self._records(connection, RunRecord, RUNS, waiting.order_by(*order)))

    def take_from_queue(self, run: str, config: dict[str, Any], broker: dict[str, Any]) -> bool:
        """Begin a queued run with this configuration; False if it is no longer queued."""
        with self._transaction() as connection:
            queued = (RUNS.c.id == run, RUNS.c.status == "queued")
            values = {"status": "waiting", "config": config, "broker": broker}
            taken = connection.execute(update(RUNS).where(*queued).values(**values)).rowcount == 1
            _seal(connection, RUNS, RUNS.c.id == run)
            return taken

    def cancel_run(self, run: str) -> None:
        """Request the end of a run; a queued run is cancelled at once."""
        with self._transaction() as connection:
            queued = (RUNS.c.id == run, RUNS.c.status == "queued")
            connection.execute(update(RUNS).where(*queued).values(status="cancelled"))
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(cancelled_at=now()))
            _seal(connection, RUNS, RUNS.c.id == run)

    def is_cancelled(self, run: str) -> bool:
        """Whether the operator requested the run's end."""
        with self._transaction() as connection:
            return connection.execute(select(RUNS.c.cancelled_at).where(RUNS.c.id == run)).scalar() is not None

    def pause_run(self, run: str, *, paused: bool) -> None:
        """Pause a run, or let it continue."""
        with self._transaction() as connection:
            at = func.coalesce(RUNS.c.paused_at, now()) if paused else None
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(paused_at=at))
            _seal(connection, RUNS, RUNS.c.id == run)

    def is_paused(self, run: str) -> bool:
        """Whether the operator paused the run."""
        with self._transaction() as connection:
            return connection.execute(select(RUNS.c.paused_at).where(RUNS.c.id == run)).scalar() is not None

    def update_run(self, run: str, **values: Any) -> None:
        """Set status, config, broker, classes, program, protocol, reason or corrections."""
        with self._transaction() as connection:
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(**values))
            _seal(connection, RUNS, RUNS.c.id == run)

    def runs(self) -> list[RunRecord]:
        """All runs, newest first."""
        with self._transaction() as connection:
            query = select(RUNS).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc())
            return list(self._records(connection, RunRecord, RUNS, query))

    def count_runs(self) -> dict[RunStatus, int]:
        """Number of runs by status."""
        with self._transaction() as connection:
            query = select(RUNS.c.status, func.count()).group_by(RUNS.c.status)
            return {row[0]: row[1] for row in connection.execute(query)}

    def run(self, run: str) -> RunRecord:
        """Raises ConfigError if there is no such run, naming existing runs."""
        with self._transaction() as connection:
            found = self._records(connection, RunRecord, RUNS, select(RUNS).where(RUNS.c.id == run))
            if (record := next(found, None)) is not None:
                return record
        if self._file and newest_copy(self._file, run):
            raise self.damaged(f"it does not know run {run!r}", run)
        names = [record.id for record in self.runs()]
        near, newest = did_you_mean(run, names), ", ".join(names[:5]) or "none yet"
        raise ConfigError(f"no run {run!r}{near or ';'} {'The' if near else 'the'} newest runs are: {newest}")

    def has_ended(self, run: str) -> bool:
        """Whether the run exists and will not be resumed."""
        with self._transaction() as connection:
            status = connection.execute(select(RUNS.c.status).where(RUNS.c.id == run)).scalar()
            return status in ENDED

    def remove_run(self, run: str) -> None:
        """Delete everything that the record has of a run."""
        with self._transaction() as connection:
            for table in reversed([table for table in TABLES.sorted_tables if table is not LABELS]):
                connection.execute(delete(table).where((table.c.id if table is RUNS else table.c.run) == run))

    # --- rounds ---------------------------------------------------------------------------------------

    def open_round(
        self, run: str, number: int, cohort: list[str], needed: int | None = None, at: str | None = None
    ) -> None:
        """Open a round, now or at a time (ISO 8601, UTC); or give an open round another cohort."""
        this = _this_round(run, number)
        with self._transaction() as connection:
            if connection.execute(select(ROUNDS.c.round).where(this)).first():
                connection.execute(update(ROUNDS).where(this).values(cohort=cohort, needed=needed))
                _seal(connection, ROUNDS, this)
            else:
                _insert(connection, ROUNDS, [RoundRecord(run, number, cohort, at or now(), needed=needed)])

    def close_round(
        self,
        run: str,
        number: int,
        state: SavedState | None,
        figures: dict[str, float],
        asked: Sequence[str] | None = None,
        at: str | None = None,
        results: Sequence[ResultRecord] | None = None,
    ) -> None:
        """Close the training of a round, now or `at` a time: store state and figures, and compute its totals.

        `state`: None if it is lost; `asked`: devices with a task, `results`: those that its server step used; by
        default the tasks and results in the record."""
        with self._transaction() as connection:
            this = _this_round(run, number)
            values = {"closed_at": at or now(), "state": msgspec.to_builtins(state), "figures": figures}
            connection.execute(update(ROUNDS).where(this).values(**values))
            self._sum_up_training(connection, run, number, asked, results)

    def round_evaluated(self, run: str, number: int, results: Sequence[ResultRecord] | None = None) -> None:
        """Close the evaluation of a round, with these results; by default those in the record."""
        with self._transaction() as connection:
            this = _this_round(run, number)
            connection.execute(update(ROUNDS).where(this).values(evaluated=True))
            self._sum_up_evaluation(connection, run, number, results)

    def asked_in(self, run: str, number: int) -> list[str]:
        """Devices with a training task in a round."""
        with self._transaction() as connection:
            return _asked_in(connection, run, number)

    def _sum_up_training(
        self,
        connection: Connection,
        run: str,
        number: int,
        asked: Sequence[str] | None = None,
        results: Sequence[ResultRecord] | None = None,
    ) -> None:
        """Compute the totals of a closed round, and update those of its devices."""
        this = _this_round(run, number)
        row = connection.execute(select(ROUNDS.c.cohort, ROUNDS.c.figures, ROUNDS.c.totals).where(this)).one()
        if results is None:
            results = self._used_in(connection, run, number, "train")
        if row.totals is None:  # otherwise its devices were counted already
            asked = _asked_in(connection, run, number) if asked is None else asked
            _add_to_devices(connection, run, number, results, asked)
        cohort = int(
            (row.figures or {}).get("cohort", len(row.cohort))
        )  # in mode buffered including devices of earlier rounds
        made = totals.trained(RoundTotals(cohort=cohort), results)
        connection.execute(update(ROUNDS).where(this).values(totals=msgspec.to_builtins(made)))
        _seal(connection, ROUNDS, this)

    def _sum_up_evaluation(
        self, connection: Connection, run: str, number: int, results: Sequence[ResultRecord] | None = None
    ) -> None:
        this = _this_round(run, number)
        row = connection.execute(select(ROUNDS.c.totals, ROUNDS.c.accuracy).where(this)).one()
        if row.totals is not None and row.accuracy is None:  # otherwise it is open, or was summed up already
            if results is None:
                results = self._used_in(connection, run, number, "evaluate")
            _add_to_devices(connection, run, number, results, ())
            made, accuracy = totals.evaluated(msgspec.convert(row.totals, RoundTotals), results)
            connection.execute(update(ROUNDS).where(this).values(totals=msgspec.to_builtins(made), accuracy=accuracy))
        _seal(connection, ROUNDS, this)

    def rounds(self, run: str) -> list[RoundRecord]:
        """All rounds with their details; the cost grows with the run."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(ROUNDS.c.run == run).order_by(ROUNDS.c.round)
            return list(self._records(connection, RoundRecord, ROUNDS, query))

    def round(self, run: str, number: int) -> RoundRecord | None:
        """One round; None if it was never opened."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(_this_round(run, number))
            return next(self._records(connection, RoundRecord, ROUNDS, query), None)

    def newest_closed(self, run: str, before: int | None = None) -> RoundRecord | None:
        """The newest closed round, or the newest before round `before`; None if there is none."""
        query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        if before is not None:
            query = query.where(ROUNDS.c.round < before)
        with self._transaction() as connection:
            query = query.order_by(ROUNDS.c.round.desc()).limit(1)
            return next(self._records(connection, RoundRecord, ROUNDS, query), None)

    def open_rounds(self, run: str) -> list[RoundRecord]:
        """Open rounds: at most one, unless an older copy of the record was restored."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_(None)).order_by(ROUNDS.c.round)
            return list(self._records(connection, RoundRecord, ROUNDS, query))

    def last_round(self, run: str) -> int:
        """Number of the newest round, 0 if there is none."""
        with self._transaction() as connection:
            return connection.execute(select(func.max(ROUNDS.c.round)).where(ROUNDS.c.run == run)).scalar() or 0

    def closed_rounds(self, run: str) -> list[int]:
        """Numbers of the closed rounds, ascending."""
        query = select(ROUNDS.c.round).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        with self._transaction() as connection:
            return [row.round for row in connection.execute(query.order_by(ROUNDS.c.round))]

    def totals(self, run: str) -> list[ClosedRound]:
        """Totals of all closed rounds, in order."""
        columns = select(ROUNDS.c.round, ROUNDS.c.totals, ROUNDS.c.figures)
        query = columns.where(ROUNDS.c.run == run, ROUNDS.c.totals.is_not(None)).order_by(ROUNDS.c.round)
        with self._transaction() as connection:
            return [
                ClosedRound(number, msgspec.convert(made, RoundTotals), figures or {})
                for number, made, figures in connection.execute(query)
            ]

    def accuracy(self, run: str, since: int = 0) -> dict[int, dict[str, float]]:
        """Accuracies by round and device, of evaluated rounds from `since` on that still have details."""
        query = select(ROUNDS.c.round, ROUNDS.c.accuracy).where(
            ROUNDS.c.run == run, ROUNDS.c.round >= since, ROUNDS.c.accuracy.is_not(None)
        )
        with self._transaction() as connection:
            return {row.round: row.accuracy for row in connection.execute(query.order_by(ROUNDS.c.round))}

    def mean_accuracy(self, run: str) -> float | None:
        """Mean accuracy of the newest evaluation; None if there is none."""
        query = select(ROUNDS.c.totals).where(ROUNDS.c.run == run, ROUNDS.c.evaluated.is_(True))
        with self._transaction() as connection:
            newest = connection.execute(query.order_by(ROUNDS.c.round.desc())).scalars()
            means = (made["accuracy_mean"] for made in newest if made)
            return next((mean for mean in means if mean is not None), None)

    def newest_totals(self, run: str, *, evaluated: bool = False) -> ClosedRound | None:
        """Totals of the newest closed round, or of the newest evaluated one; None if there is none."""
        query = select(ROUNDS.c.round, ROUNDS.c.totals, ROUNDS.c.figures)
        query = query.where(ROUNDS.c.run == run, ROUNDS.c.totals.is_not(None))
        if evaluated:
            query = query.where(ROUNDS.c.accuracy.is_not(None))
        with self._transaction() as connection:
            row = connection.execute(query.order_by(ROUNDS.c.round.desc()).limit(1)).first()
            return ClosedRound(row[0], msgspec.convert(row[1], RoundTotals), row[2] or {}) if row else None

    def figure_counts(self, run: str, names: Sequence[str]) -> dict[tuple[float | None, ...], int]:
        """Number of closed rounds by the values of these figures; None: the round lacks the figure."""
        finite = _without_infinite(ROUNDS.c.figures)
        figures: ColumnElement[Any] = type_coerce(finite, JSON) if self._file else cast(finite, JSON)
        values = [figures[name].as_float().label(name) for name in names]
        query = select(*values, func.count()).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        with self._transaction() as connection:
            return {tuple(row[:-1]): row[-1] for row in connection.execute(query.group_by(*values))}

    def thin(self, run: str, before: int) -> None:
        """Remove details of rounds before a closed round: cohorts, states, answered tasks, results, refusals, and
        accuracies by device. Totals, figures, strikes, and what is needed to continue are kept."""
        with self._transaction() as connection:
            thinned = connection.execute(select(RUNS.c.thinned).where(RUNS.c.id == run)).scalar() or 0
            kept = select(ROUNDS.c.round, ROUNDS.c.opened_at).where(
                ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None)
            )
            oldest = connection.execute(kept.where(ROUNDS.c.round <= before).order_by(ROUNDS.c.round.desc())).first()
            if oldest is None or oldest.round <= thinned:
                return
            before, opened_at = oldest
            old = and_(ROUNDS.c.run == run, ROUNDS.c.round >= thinned, ROUNDS.c.round < before)
            connection.execute(update(ROUNDS).where(old).values(cohort=[], state=None, accuracy=None))
            _seal(connection, ROUNDS, old)
            for gone in (
                delete(RESULTS).where(RESULTS.c.run == run, RESULTS.c.used_in < before),
                delete(TASKS).where(TASKS.c.run == run, TASKS.c.round < before, TASKS.c.outcome.is_not(None)),
                delete(REFUSALS).where(REFUSALS.c.run == run, REFUSALS.c.round < before),
                delete(REFUSALS).where(REFUSALS.c.run == run, REFUSALS.c.round.is_(None), REFUSALS.c.at < opened_at),
                delete(EXPECTATIONS).where(
                    EXPECTATIONS.c.run == run,
                    EXPECTATIONS.c.id.not_in(
                        select(TASKS.c.expected).where(TASKS.c.run == run, TASKS.c.expected.is_not(None))
                    ),
                ),
            ):
                connection.execute(gone)
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(thinned=before))
            _seal(connection, RUNS, RUNS.c.id == run)

    def compact(self) -> None:
        """Shrink the file by its unused space."""
        if self._file:
            with self._transaction() as connection:
                connection.exec_driver_sql("VACUUM")

    # --- tasks ----------------------------------------------------------------------------------------

    def add_tasks(self, run: str, tasks: Iterable[TaskRecord]) -> None:
        """Store training tasks, new or repeated in the same round."""
        rows, contents, at = [], dict[str, Any](), now()
        for task in tasks:
            row = {**msgspec.structs.asdict(task), "run": run, "asked_at": at}
            if task.expected:
                row["expected"] = digest_of(content := msgspec.json.encode(task.expected))
                contents[row["expected"]] = content
            rows.append(row)
        if not rows:
            return
        with self._transaction() as connection:
            ids = EXPECTATIONS.c.run == run, EXPECTATIONS.c.id.in_(list(contents))
            known = set(connection.execute(select(EXPECTATIONS.c.id).where(*ids)).scalars())
            fresh = [
                {"run": run, "id": name, "content": msgspec.json.decode(content)}
                for name, content in contents.items()
                if name not in known
            ]
            if fresh:
                connection.execute(EXPECTATIONS.insert(), fresh)
            _replace(connection, TASKS, rows)

    def end_tasks(
        self,
        run: str,
        tasks: Sequence[tuple[int, str]],
        outcome: str,
        times: Mapping[str, TaskTimes] = MappingProxyType({}),
    ) -> None:
        """End tasks (round, device) with a `TaskState`; the first end of a task is kept. `times`: by device."""
        if not tasks:
            return
        with self._transaction() as connection:
            _end_tasks(connection, [(run, number, device) for number, device in tasks], outcome, times)

    def count_attempt(self, run: str, round_number: int, device: str, attempt: int) -> None:
        """Store the number of a new attempt at a task."""
        this = (TASKS.c.run == run, TASKS.c.round == round_number, TASKS.c.device == device)
        with self._transaction() as connection:
            connection.execute(update(TASKS).where(*this).values(attempt=attempt))

    def unanswered(self, run: str, round_number: int | None = None) -> list[TaskRecord]:
        """Tasks under way, of one round or of all, the newest last."""
        columns = (TASKS.c.round, TASKS.c.device, TASKS.c.program, TASKS.c.groups, TASKS.c.attempt)
        there = and_(EXPECTATIONS.c.run == TASKS.c.run, EXPECTATIONS.c.id == TASKS.c.expected)
        query = select(*columns, EXPECTATIONS.c.content.label("expected")).outerjoin(EXPECTATIONS, there)
        query = query.where(TASKS.c.run == run, TASKS.c.outcome.is_(None)).order_by(TASKS.c.round)
        if round_number is not None:
            query = query.where(TASKS.c.round == round_number)
        with self._transaction() as connection:
            return [_record(TaskRecord, row) for row in _rows(connection, query)]

    def expected(self, run: str) -> dict[tuple[int, str], Expected]:
        """The predicted cost of each training task, by (round, device)."""
        there = and_(EXPECTATIONS.c.run == TASKS.c.run, EXPECTATIONS.c.id == TASKS.c.expected)
        query = select(TASKS.c.round, TASKS.c.device, TASKS.c.expected).where(TASKS.c.run == run)
        contents = select(EXPECTATIONS.c.id, EXPECTATIONS.c.content).where(EXPECTATIONS.c.run == run)
        with self._transaction() as connection:
            known = {name: msgspec.convert(content, Expected) for name, content in connection.execute(contents)}
            rows = connection.execute(query.join(EXPECTATIONS, there))
            return {(number, device): known[name] for number, device, name in rows}

    def task_histories(self, run: str, rounds: Sequence[int], device: str | None = None) -> list[TaskHistory]:
        """The training tasks of these rounds, of all devices or one, with their accepted results: by key, so that the
        time does not depend on the run's other rounds."""
        there = and_(EXPECTATIONS.c.run == TASKS.c.run, EXPECTATIONS.c.id == TASKS.c.expected)
        answer = and_(
            RESULTS.c.run == TASKS.c.run, RESULTS.c.round == TASKS.c.round, RESULTS.c.device == TASKS.c.device,
            RESULTS.c.kind == "train",
        )  # fmt: skip
        query = select(
            TASKS.c.round, TASKS.c.device, TASKS.c.asked_at, TASKS.c.attempt, TASKS.c.outcome,
            *(TASKS.c[name] for name in TaskTimes._fields), EXPECTATIONS.c.content.label("expected"),
            RESULTS.c.received_at, RESULTS.c.used_in, RESULTS.c.use,
        ).outerjoin(EXPECTATIONS, there).outerjoin(RESULTS, answer)  # fmt: skip
        query = query.where(TASKS.c.run == run, TASKS.c.round.in_(rounds))
        if device is not None:
            query = query.where(TASKS.c.device == device)
        with self._transaction() as connection:
            return [
                TaskHistory(
                    times=TaskTimes(*(row.pop(name) for name in TaskTimes._fields)),
                    **row
                    | {
                        "expected": row["expected"] and msgspec.convert(row["expected"], Expected),
                        "use": row["use"] and msgspec.convert(row["use"], ResourceUse),
                    },
                )
                for row in _rows(connection, query.order_by(TASKS.c.round, TASKS.c.device))
            ]

    def asked(self, run: str) -> dict[str, Asked]:
        """By device, how often and when it was asked to train, in closed rounds."""
        query = select(DEVICES.c.device, DEVICES.c.last_asked, DEVICES.c.times_asked)
        with self._transaction() as connection:
            rows = connection.execute(query.where(DEVICES.c.run == run, DEVICES.c.times_asked > 0))
            return {device: Asked(last, times) for device, last, times in rows}

    # --- results --------------------------------------------------------------------------------------

    def add_result(self, device: str, result: Result, used_in: int | None = None) -> None:
        """Store an accepted result for the server step of its round or a later one; an existing one is not changed."""
        self.add_results([(device, result, used_in)])

    def add_results(
        self,
        results: Sequence[tuple[str, Result, int | None]],
        times: Mapping[str, TaskTimes] = MappingProxyType({}),
    ) -> list[ResultRecord]:
        """Store accepted results, as `add_result` does, and end their tasks, in one transaction. `times`: of the tasks,
        by device. Returns the results as the record has them, unless it had one already."""
        if not results:
            return []
        with self._transaction() as connection:
            if self._term:  # they are acknowledged even when another leader has written all of them
                check_term(connection, self._term)
            trained = [(result.run, result.round, device) for device, result, _ in results if result.kind == "train"]
            _end_tasks(connection, trained, "accepted", times)
            records = [
                ResultRecord(
                    result.run, result.round, device, result.kind, result.samples, result.metrics, result.use,
                    result.upload.digest if result.upload else None, used_in or result.round, result.by_class,
                )
                for device, result, used_in in results
            ]  # fmt: skip
            at = now()
            rows = [
                {
                    **msgspec.structs.asdict(record),
                    "use": _measured(record.use),
                    "by_class": record.by_class or None,
                    "received_at": at,
                }
                for record in records
            ]
            if not self._file:
                there = _existing(connection, [result for _, result, _ in results], [device for device, *_ in results])
                rows = [row for row in rows if (row["run"], row["round"], row["kind"], row["device"]) not in there]
            if rows:
                _write(connection, RESULTS, rows, "IGNORE")
            return records

    def drop_result(self, run: str, number: int, kind: TaskKind, device: str) -> None:
        """Delete a result of an open round that cannot be used, so that its device can send another."""
        with self._transaction() as connection:
            connection.execute(delete(RESULTS).where(_this_result(run, number, kind, device)))

    def has_result(self, run: str, number: int, kind: TaskKind, device: str) -> bool:
        """Whether a device's result was accepted."""
        query = select(RESULTS.c.device).where(_this_result(run, number, kind, device))
        with self._transaction() as connection:
            return connection.execute(query).first() is not None

    def evaluations(self, run: str, rounds: Sequence[int], device: str) -> list[ResultRecord]:
        """A device's evaluations of these rounds: by key, so that the time does not depend on the run's length."""
        query = select(RESULTS).where(
            RESULTS.c.run == run, RESULTS.c.round.in_(rounds), RESULTS.c.device == device, RESULTS.c.kind == "evaluate"
        )
        with self._transaction() as connection:
            return list(self._records(connection, ResultRecord, RESULTS, query.order_by(RESULTS.c.round)))

    def results(self, run: str, round_number: int | None = None, kind: TaskKind | None = None) -> list[ResultRecord]:
        """Results sorted by round and device; for a whole run the cost grows with the run."""
        query = select(RESULTS).where(RESULTS.c.run == run)
        if round_number is not None:
            query = query.where(RESULTS.c.round == round_number)
        if kind is not None:
            query = query.where(RESULTS.c.kind == kind)
        with self._transaction() as connection:
            query = query.order_by(RESULTS.c.round, RESULTS.c.device)
            return list(self._records(connection, ResultRecord, RESULTS, query))

    def used_in(self, run: str, number: int, kind: TaskKind = "train") -> list[ResultRecord]:
        """Results that the server step, or the evaluation, of a round uses, including late ones."""
        with self._transaction() as connection:
            return self._used_in(connection, run, number, kind)

    def _used_in(self, connection: Connection, run: str, number: int, kind: TaskKind) -> list[ResultRecord]:
        query = select(RESULTS).where(RESULTS.c.run == run, RESULTS.c.used_in == number, RESULTS.c.kind == kind)
        found = self._records(connection, ResultRecord, RESULTS, query)
        return sorted(
            found, key=lambda result: (result.round, result.device)
        )  # sorting in SQLite would scan all results

    def answered(self, run: str, number: int, kind: TaskKind) -> set[str]:
        """Devices with a result of a round, whichever round it counts in."""
        query = select(RESULTS.c.device).where(RESULTS.c.run == run, RESULTS.c.round == number, RESULTS.c.kind == kind)
        with self._transaction() as connection:
            return set(connection.execute(query).scalars())

    def counted(self, run: str, number: int) -> set[str]:
        """Devices with a training result for the server step of a round."""
        query = select(RESULTS.c.device).where(
            RESULTS.c.run == run, RESULTS.c.used_in == number, RESULTS.c.kind == "train"
        )
        with self._transaction() as connection:
            return set(connection.execute(query).scalars())

    def uploads_since(self, run: str, number: int) -> set[str]:
        """Digests of uploads for the server steps of a round and all later ones."""
        query = select(RESULTS.c.upload).where(
            RESULTS.c.run == run, RESULTS.c.used_in >= number, RESULTS.c.kind == "train", RESULTS.c.upload.is_not(None)
        )
        with self._transaction() as connection:
            return set(connection.execute(query).scalars())

    def device(self, run: str, device: str) -> DeviceRecord:
        """Totals of one device from closed rounds; of an unknown device they are empty."""
        with self._transaction() as connection:
            return _devices(connection, run, [device])[device]

    def devices(self, run: str) -> list[DeviceRecord]:
        """Totals of all devices from closed rounds, by name."""
        query = select(DEVICES).where(DEVICES.c.run == run).order_by(DEVICES.c.device)
        with self._transaction() as connection:
            return list(self._records(connection, DeviceRecord, DEVICES, query))

    def note_software(self, run: str, versions: Mapping[str, str]) -> None:
        """Store the software versions of devices."""
        if not versions:
            return
        with self._transaction() as connection:
            known = _devices(connection, run, versions)
            changed = [msgspec.structs.replace(known[name], software=version) for name, version in versions.items()]
            _replace(connection, DEVICES, [msgspec.to_builtins(record) for record in changed])

    def set_label(self, device: str, name: str, value: str | None) -> None:
        """Set a label of a device in all runs; None: its own is used again."""
        with self._transaction() as connection:
            connection.execute(delete(LABELS).where(LABELS.c.device == device, LABELS.c.name == name))
            if value is not None:
                connection.execute(LABELS.insert().values(device=device, name=name, value=value))

    def labels(self, device: str | None = None) -> dict[str, dict[str, str]]:
        """The labels that the operator set, by device; of one device or of all."""
        query = select(LABELS).order_by(LABELS.c.device, LABELS.c.name)
        if device is not None:
            query = query.where(LABELS.c.device == device)
        found: dict[str, dict[str, str]] = {}
        with self._transaction() as connection:
            for of, name, value in connection.execute(query):
                found.setdefault(of, {})[name] = value
        return found

    def add_log(self, log: DeviceLog) -> None:
        """Store the log of a device; of its logs in this run the newest LOGS_KEPT stay."""
        mine = (LOGS.c.run == log.run, LOGS.c.device == log.device)
        with self._transaction() as connection:
            _insert(connection, LOGS, [log])
            newest = select(LOGS.c.id).where(*mine).order_by(LOGS.c.id.desc()).limit(LOGS_KEPT)
            connection.execute(delete(LOGS).where(*mine, LOGS.c.id.not_in(newest)))

    def logs(self, device: str, run: str | None = None) -> list[DeviceLog]:
        """Logs of a device in one run or in all, the newest last."""
        query = select(LOGS).where(LOGS.c.device == device).order_by(LOGS.c.at, LOGS.c.id)
        if run is not None:
            query = query.where(LOGS.c.run == run)
        with self._transaction() as connection:
            return list(self._records(connection, DeviceLog, LOGS, query))

    def device_totals(self, run: str) -> dict[str, DeviceTotals]:
        """The totals of `devices` by name, without a check of their seals: for display."""
        query = select(DEVICES.c.device, DEVICES.c.totals).where(DEVICES.c.run == run).order_by(DEVICES.c.device)
        with self._transaction() as connection:
            return {name: msgspec.convert(made or {}, DeviceTotals) for name, made in connection.execute(query)}

    def add_refusal(
        self,
        run: str,
        round_number: int | None,
        device: str,
        kind: str,
        reason: str,
        broke: BudgetKind | None = None,
        *,
        lost: bool = False,
    ) -> None:
        """Store a refusal, or with `lost` something that never arrived. `broke`: the budget that stopped the device."""
        refusal = RefusalRecord(round_number, device, kind, reason, now(), broke, lost)
        with self._transaction() as connection:
            _insert(connection, REFUSALS, [refusal], run=run)
            if broke:
                self._add_broken(connection, run, device, broke)

    def _add_broken(self, connection: Connection, run: str, device: str, kind: BudgetKind) -> None:
        known = _devices(connection, run, [device])[device]
        changed = msgspec.structs.replace(known, totals=totals.with_broken(known.totals, (kind,)))
        _replace(connection, DEVICES, [msgspec.to_builtins(changed)])

    def refusals(
        self, run: str, newest: int | None = None, *, round_number: int | None = None, device: str | None = None
    ) -> list[RefusalRecord]:
        """All refusals, or those of a round or a device, in order; `newest`: at most this number of the newest."""
        query = select(REFUSALS).where(REFUSALS.c.run == run)
        if round_number is not None:
            query = query.where(REFUSALS.c.round == round_number)
        if device is not None:
            query = query.where(REFUSALS.c.device == device)
        with self._transaction() as connection:
            query = query.order_by(REFUSALS.c.id) if newest is None else query.order_by(REFUSALS.c.id.desc())
            found = list(self._records(connection, RefusalRecord, REFUSALS, query.limit(newest)))
            return found if newest is None else found[::-1]

    def refusal_counts(self, run: str, most: int) -> list[RefusalCount]:
        """Equal refusals, counted by the database: the most frequent first, at most `most` of them."""
        alike = (REFUSALS.c.kind, REFUSALS.c.reason, REFUSALS.c.lost)
        times = func.count().label("times")
        query = select(*alike, times, func.count(REFUSALS.c.device.distinct()), func.max(REFUSALS.c.at))
        query = query.where(REFUSALS.c.run == run).group_by(*alike).order_by(times.desc(), REFUSALS.c.reason)
        with self._transaction() as connection:
            return [RefusalCount(*row) for row in connection.execute(query.limit(most))]

    # --- strikes and quarantine ---------------------------------------------------------------------

    def add_strike(self, run: str, round_number: int, device: str, reason: str) -> int:
        """Store a strike, at most one per round. Returns the device's strikes since its last quarantine."""
        mine = (STRIKES.c.run == run, STRIKES.c.device == device)
        with self._transaction() as connection:
            if not connection.execute(select(STRIKES.c.id).where(*mine, STRIKES.c.round == round_number)).first():
                _insert(connection, STRIKES, [StrikeRecord(round_number, device, reason, now(), False)], run=run)
                _seal(connection, STRIKES, *mine)  # the seal covers the id, too
            return len(connection.execute(select(STRIKES.c.id).where(*mine, STRIKES.c.spent.is_(False))).all())

    def strikes(self, run: str) -> list[StrikeRecord]:
        with self._transaction() as connection:
            query = select(STRIKES).where(STRIKES.c.run == run).order_by(STRIKES.c.id)
            return list(self._records(connection, StrikeRecord, STRIKES, query))

    def strike_counts(self, run: str) -> dict[str, StrikeCount]:
        """By device, its strikes, counted by the database."""
        unspent = func.sum(case((STRIKES.c.spent.is_(False), 1), else_=0))
        query = select(STRIKES.c.device, func.count(), unspent).where(STRIKES.c.run == run).group_by(STRIKES.c.device)
        with self._transaction() as connection:
            return {device: StrikeCount(ever, unspent) for device, ever, unspent in connection.execute(query)}

    def add_quarantine(self, run: str, device: str, round_number: int, until_round: int | None, reason: str) -> None:
        """Store a quarantine; the device's strikes are counted from 0 again."""
        with self._transaction() as connection:
            made = QuarantineRecord(device, round_number, until_round, reason, now(), None)
            _insert(connection, QUARANTINES, [made], run=run)
            _seal(connection, QUARANTINES, QUARANTINES.c.run == run, QUARANTINES.c.device == device)
            _spend_strikes(connection, run, device)

    def quarantines(self, run: str) -> list[QuarantineRecord]:
        """All quarantines, including ended ones."""
        with self._transaction() as connection:
            query = select(QUARANTINES).where(QUARANTINES.c.run == run).order_by(QUARANTINES.c.id)
            return list(self._records(connection, QuarantineRecord, QUARANTINES, query))

    def quarantined(self, run: str, round_number: int) -> dict[str, QuarantineRecord]:
        """By device, the quarantines that hold in a round."""
        return {record.device: record for record in self.quarantines(run) if record.holds(round_number)}

    def release(self, run: str, device: str) -> bool:
        """End a device's quarantines and reset its strikes; False if it had neither."""
        held = (QUARANTINES.c.run == run, QUARANTINES.c.device == device, QUARANTINES.c.released_at.is_(None))
        with self._transaction() as connection:
            ended = connection.execute(update(QUARANTINES).where(*held).values(released_at=now()))
            _seal(connection, QUARANTINES, *held[:2])
            return ended.rowcount + _spend_strikes(connection, run, device) > 0


# --- damage and copies ----------------------------------------------------------------------------------


def is_whole(file: Path) -> bool:
    """Whether a copy of the database, which no process writes, is intact."""
    address = f"file:{quote(str(file))}?mode=ro&immutable=1"
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True))
    try:
        with engine.connect() as connection:
            if connection.execute(text("PRAGMA integrity_check(1)")).scalar() != "ok":
                return False
            for table in TABLES.sorted_tables:
                if not inspect(connection).has_table(table.name):  # a copy of an older version
                    continue
                there = {column["name"] for column in inspect(connection).get_columns(table.name)}
                if SEAL not in table.columns or SEAL not in there:
                    continue
                rows = _rows(connection, select(*(column for column in table.columns if column.name in there)))
                if not all(row[SEAL] in (None, _seal_of(table, row)) for row in rows):
                    return False
            return True
    except (SQLAlchemyError, ValueError):
        return False
    finally:
        engine.dispose()


def newest_copy(database: Path, run: str = "*") -> Path | None:
    """The newest intact copy of a damaged database, of any run or of one; see `coordinator.record.backups`."""
    made = {file: file.stat().st_mtime_ns for file in database.parent.glob(f"{run}/{COPIES}/round-*.db")}
    return next((file for file in sorted(made, key=lambda file: made[file], reverse=True) if is_whole(file)), None)


def remedy(database: Path, why: str, of_run: str = "*") -> str:
    """The error message for a damaged database: names the newest intact copy and the commands that restore it."""
    damaged = f"{database} is damaged: {why}"
    copy = newest_copy(database, of_run)
    if copy is None:
        return (
            f"{damaged}. There is no good copy of it in {database.parent}/RUN/{COPIES}: restore your own backup, or "
            f"move it away and start over (tensors of finished runs are in {database.parent}/RUN/model.safetensors)"
        )
    run, number = copy.parent.parent.name, copy.stem.partition("-")[2]
    return (
        f"{damaged}. The newest good copy is {copy}, made after round {number} of run {run}. While no coordinator "
        f"serves this folder, put it back: mv {database} {database}.damaged; rm -f {database}-wal {database}-shm; "
        f"cp {copy} {database}; then: coordinator start --resume {run} --runs {database.parent}"
    )


# --- rows -----------------------------------------------------------------------------------------------


def _rows(connection: Connection, query: Select[Any]) -> Iterator[dict[str, Any]]:
    found = connection.execute(query)
    names = list(found.keys())
    for row in found:
        yield dict(zip(names, row, strict=True))


@cache
def _fields(kind: type[Struct]) -> list[tuple[str, bool]]:
    """The fields of a record class, and whether they have a default."""
    return [(field.name, not field.required) for field in msgspec.structs.fields(kind)]


def _record(kind: type[_R], row: dict[str, Any]) -> _R:
    """A row as a record; empty or missing columns get the field's default."""
    values = {
        name: value for name, has_default in _fields(kind) if (value := row.get(name)) is not None or not has_default
    }
    return msgspec.convert(values, kind)


def _measured(values: Struct) -> dict[str, Any]:
    """The fields that are not None, which is the default of all that may be."""
    return {name: value for name, value in msgspec.structs.asdict(values).items() if value is not None}


def _insert(connection: Connection, table: Table, records: Iterable[Struct], **more: Any) -> None:
    """Insert rows; `more` are further columns."""
    rows = [{**msgspec.to_builtins(record), **more} for record in records]
    _write(connection, table, rows)


def _replace(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, replacing those with the same keys."""
    if connection.dialect.name != "sqlite":
        keys = [column.name for column in table.primary_key]
        this = [table.c[name] == bindparam(f"this_{name}") for name in keys]
        connection.execute(delete(table).where(*this), [{f"this_{name}": row[name] for name in keys} for row in rows])
    _write(connection, table, rows, "REPLACE")


def _write(connection: Connection, table: Table, rows: list[dict[str, Any]], on_conflict: str = "ABORT") -> None:
    """Insert sealed rows; `on_conflict` says what SQLite does with an existing row."""
    if connection.dialect.name != "sqlite":
        connection.execute(table.insert(), _sealed(table, [_without_zero_bytes(row) for row in rows]))
        return
    rows = _sealed(table, rows)
    # the same statement as SQLAlchemy's, without its processing of each value
    names = list(rows[0])
    held = [isinstance(table.c[name].type, JSON) for name in names]
    values = [
        tuple(
            to_json(value) if as_json and value is not None else value
            for as_json, value in zip(held, row.values(), strict=True)
        )
        for row in rows
    ]
    marks = ", ".join("?" * len(names))
    connection.exec_driver_sql(
        f"INSERT OR {on_conflict} INTO {table.name} ({', '.join(names)}) VALUES ({marks})", values
    )


def _without_zero_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """PostgreSQL refuses texts with a byte of 0, which a device's message may have."""
    return {name: value.replace("\0", "\ufffd") if isinstance(value, str) else value for name, value in row.items()}


def _without_infinite(figures: ColumnElement[Any]) -> ColumnElement[Any]:
    """JSON as text with null in place of numbers that are not finite, which databases refuse in JSON."""
    held: ColumnElement[Any] = cast(figures, Text)
    for number in ("NaN", "-Infinity", "Infinity"):
        held = func.replace(held, number, "null")
    return held


def _sealed(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {SEAL: _seal_of(table, row)} for row in rows] if SEAL in table.columns else rows


def _seal(connection: Connection, table: Table, *where: ColumnElement[bool]) -> None:
    """Update the seals of rows that were changed."""
    for row in list(_rows(connection, select(table).where(*where))):
        this = [column == row[column.name] for column in table.primary_key]
        connection.execute(update(table).where(*this).values(seal=_seal_of(table, row)))


@cache
def _sealed_columns(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.name != SEAL]


def _seal_of(table: Table, row: Mapping[str, Any]) -> str:
    """The digest of a row's non-empty columns, so that a new column does not change existing seals."""
    held = {name: value for name in _sealed_columns(table) if (value := row.get(name)) is not None}
    return digest_of(_SORTING_ENCODER.encode(held))


def _this_round(run: str, number: int) -> ColumnElement[bool]:
    return and_(ROUNDS.c.run == run, ROUNDS.c.round == number)


def _this_result(run: str, number: int, kind: TaskKind, device: str) -> ColumnElement[bool]:
    key = (RESULTS.c.run == run, RESULTS.c.round == number, RESULTS.c.device == device, RESULTS.c.kind == kind)
    return and_(*key)


def _devices(connection: Connection, run: str, names: Iterable[str]) -> dict[str, DeviceRecord]:
    """The records of these devices; new ones for unknown devices."""
    known = {name: DeviceRecord(run, name) for name in names}
    for row in _rows(connection, select(DEVICES).where(DEVICES.c.run == run, DEVICES.c.device.in_(list(known)))):
        known[row["device"]] = _record(DeviceRecord, row)
    return known


def _end_tasks(
    connection: Connection, tasks: Sequence[tuple[str, int, str]], outcome: str, times: Mapping[str, TaskTimes]
) -> None:
    """End tasks, given as (run, round, device); `times` by device."""
    if tasks:
        at = now()
        keys = [
            {"of": run, "number": number, "name": device, **times.get(device, TaskTimes())._asdict(), "ended_at": at}
            for run, number, device in tasks
        ]
        this = [
            TASKS.c.run == bindparam("of"),
            TASKS.c.round == bindparam("number"),
            TASKS.c.device == bindparam("name"),
        ]
        changed: dict[str, Any] = {name: bindparam(name) for name in TaskTimes._fields}
        query = update(TASKS).where(*this, TASKS.c.outcome.is_(None)).values(outcome=outcome, groups={}, **changed)
        connection.execute(query, keys)


def _asked_in(connection: Connection, run: str, number: int) -> list[str]:
    query = select(TASKS.c.device).where(TASKS.c.run == run, TASKS.c.round == number)
    return list(connection.execute(query).scalars())


def _add_to_devices(
    connection: Connection, run: str, number: int, results: Sequence[ResultRecord], asked: Iterable[str]
) -> None:
    """Add a round's results and asked devices to the totals of its devices."""
    asked = set(asked)
    known = _devices(connection, run, asked | {result.device for result in results})
    for name in asked:
        last, times = max(known[name].last_asked, number), known[name].times_asked + 1
        known[name] = msgspec.structs.replace(known[name], last_asked=last, times_asked=times)
    for result in results:
        before = known[result.device]
        known[result.device] = msgspec.structs.replace(before, totals=totals.with_result(before.totals, result))
    if known:
        rows = [{**msgspec.structs.asdict(record), "totals": _measured(record.totals)} for record in known.values()]
        _replace(connection, DEVICES, rows)


def _spend_strikes(connection: Connection, run: str, device: str) -> int:
    mine = (STRIKES.c.run == run, STRIKES.c.device == device, STRIKES.c.spent.is_(False))
    spent = connection.execute(update(STRIKES).where(*mine).values(spent=True)).rowcount
    _seal(connection, STRIKES, *mine[:2])
    return spent


def _existing(connection: Connection, results: Sequence[Result], devices: Sequence[str]) -> set[tuple[Any, ...]]:
    """The keys (run, round, kind, device) of results that the store already has."""
    columns = (RESULTS.c.run, RESULTS.c.round, RESULTS.c.kind, RESULTS.c.device)
    query = select(*columns).where(
        RESULTS.c.run.in_({result.run for result in results}),
        RESULTS.c.round.in_({result.round for result in results}),
        RESULTS.c.device.in_(devices),
    )
    return {tuple(row) for row in connection.execute(query)}


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
