"""What a run's record is: runs, rounds and results in SQL, written before anybody is told.

SQLite by default (write-ahead log, synced at commit); any SQLAlchemy URL works. Tensors are blobs; here
are their digests.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    Integer,
    MetaData,
    Select,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.schema import CreateColumn

from coordinator.cohort import Asked
from coordinator.downlink import Reference
from fedvit.blobs import digest_of
from fedvit.descriptors import are_used_up, how_many
from fedvit.errors import ConfigError, Damaged, DiskFull, StorageFailed, TooManyOpenFiles
from fedvit.resources import BudgetKind, ResourceUse
from fedvit.wire.messages import Result, TaskKind
from profiles.prediction import Expected

SEAL = "seal"
"""Column of every table that tensors depend on: a digest of the row's other columns, since SQLite has none itself."""

COPIES = "backups"
"""In a run's folder: copies of the database."""

_tables = MetaData()

_runs = Table(
    "runs",
    _tables,
    Column("id", String, primary_key=True),
    Column("created_at", String, nullable=False),  # ISO 8601, UTC
    Column("status", String, nullable=False),  # waiting, running, finished, failed
    Column("config", JSON, nullable=False),
    Column("classes", JSON),
    Column("program", String),  # digest
    Column("protocol", String),  # how accuracy is measured
    Column("reason", String),  # why it failed
    Column("corrections", JSON),  # by device and budget: factors by which predictions were too low
    Column(SEAL, String),
)

_rounds = Table(
    "rounds",
    _tables,
    Column("run", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("cohort", JSON, nullable=False),
    Column("opened_at", String, nullable=False),
    Column("closed_at", String),
    Column("evaluated", Boolean, nullable=False, default=False),
    Column("state", JSON),  # digests of the server's state after the round
    Column("figures", JSON),
    Column("expected", JSON),  # by device: what its part was expected to cost
    Column("needed", Integer),  # results that close it at once
    Column(SEAL, String),
    ForeignKeyConstraint(["run"], ["runs.id"]),
)

_results = Table(
    "results",
    _tables,
    Column("run", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("samples", Integer, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("use", JSON, nullable=False),
    Column("upload", String),  # digest
    Column("received_at", String, nullable=False),
    Column("used_in", Integer),  # the round whose server step takes it; empty: its own
    Column(SEAL, String),
)

_tasks = Table(
    "tasks",
    _tables,
    Column("run", String, primary_key=True),
    Column("round", Integer, primary_key=True),
    Column("device", String, primary_key=True),
    Column("program", String, nullable=False),  # digest
    Column("groups", JSON, nullable=False),  # group -> digest
    Column("asked_at", String, nullable=False),
    Column("outcome", String),  # accepted, failed, declined, cancelled, lost; empty: at work
)
"""Every training task. Evaluations need none: they are asked again."""

_refusals = Table(
    "refusals",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("run", String, nullable=False),
    Column("round", Integer),
    Column("device", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("at", String, nullable=False),
    Column("broke", String),  # the budget that the device did not keep
)

_strikes = Table(
    "strikes",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("run", String, nullable=False),
    Column("round", Integer, nullable=False),
    Column("device", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("at", String, nullable=False),
    Column("spent", Boolean, nullable=False, default=False),  # led to a quarantine, or was forgiven
    Column(SEAL, String),
)

_quarantines = Table(
    "quarantines",
    _tables,
    Column("id", Integer, primary_key=True),
    Column("run", String, nullable=False),
    Column("device", String, nullable=False),
    Column("round", Integer, nullable=False),  # of the last strike
    Column("until_round", Integer),  # the last one that it lasts; without one until it is released
    Column("reason", String, nullable=False),
    Column("at", String, nullable=False),
    Column("released_at", String),
    Column(SEAL, String),
)


class SavedState(msgspec.Struct, frozen=True):
    """A `ServerState` as digests."""

    groups: dict[str, str]  # group -> digest: the very blobs that devices fetch, unless there is a reference
    memory: str | None
    uploads: dict[str, str]
    references: dict[str, Reference] = {}  # of groups that devices get coded

    def sent(self, group: str) -> str:
        """The blob with which devices begin."""
        return self.references[group].digest if group in self.references else self.groups[group]


class RunRecord(NamedTuple):
    id: str
    created_at: str
    status: str
    config: dict[str, Any]
    classes: tuple[str, ...]
    program: str | None
    protocol: str | None
    reason: str | None
    corrections: dict[str, dict[BudgetKind, float]]


class RoundRecord(NamedTuple):
    run: str
    round: int
    cohort: list[str]
    opened_at: str
    closed_at: str | None
    evaluated: bool
    state: SavedState | None
    figures: dict[str, float]
    expected: dict[str, Expected]  # by device
    needed: int | None


class TaskRecord(NamedTuple):
    """A training task that a device has not answered."""

    round: int
    device: str
    program: str  # digest
    groups: dict[str, str]


class ResultRecord(NamedTuple):
    run: str
    round: int
    device: str
    kind: TaskKind
    samples: int
    metrics: dict[str, float]
    use: ResourceUse
    upload: str | None
    used_in: int  # the round whose server step takes it


class RefusalRecord(NamedTuple):
    round: int | None
    device: str
    kind: str
    reason: str
    at: str
    broke: BudgetKind | None = None


class StrikeRecord(NamedTuple):
    round: int
    device: str
    reason: str
    at: str
    spent: bool  # led to a quarantine, or was forgiven


class QuarantineRecord(NamedTuple):
    device: str
    round: int  # of the last strike
    until_round: int | None  # the last one that it lasts; None: until it is released
    reason: str
    at: str
    released_at: str | None

    def holds(self, round_number: int) -> bool:
        """Whether it keeps the device out of a round."""
        over = self.until_round is not None and round_number > self.until_round
        return self.released_at is None and not over


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE")
"""What SQLite says when a write finds no room; the second where a limit on sizes of files is in the way."""


_DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPTFS")
"""How the names of errors begin that SQLite has for a file that it did not write so."""


class Store:
    """Raises StorageFailed when the database cannot be read or written, NoRoom for want of room or descriptors,
    Damaged, with what to do, when it does not hold what was written to it."""

    def __init__(self, url: str) -> None:
        self._engine: Engine = create_engine(url)
        self._file = Path(self._engine.url.database or "") if self._engine.dialect.name == "sqlite" else None
        if self._file:
            event.listen(self._engine, "connect", _prepare_sqlite)
            self._check_file(self._file)
        with self._transaction() as connection:
            _tables.create_all(connection)
            self._add_columns(connection)
        # what its journal lost, SQLite does not know
        if self._file and not self.runs() and newest_copy(self._file):
            raise self.damaged("it holds no run")

    def _add_columns(self, connection: Connection) -> None:
        """What tables of an earlier version lack; every column that came later may be empty."""
        for table in _tables.sorted_tables:
            there = {column["name"] for column in inspect(connection).get_columns(table.name)}
            for column in table.columns:
                if column.name in there:
                    continue
                if not column.nullable:
                    raise self.damaged(f"table {table.name!r} has no column {column.name!r}")
                described = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {described}"))

    def _check_file(self, file: Path) -> None:
        """As a whole, before anything in it is relied upon."""
        if not file.is_file():
            return
        with self._transaction() as connection:
            found = connection.execute(text("PRAGMA integrity_check(1)")).scalar()
            if found != "ok":
                raise self.damaged(str(found))

    @classmethod
    def in_folder(cls, folder: Path) -> "Store":
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run folder {folder} cannot be made: {error.strerror}") from error
        return cls(f"sqlite:///{folder / 'fedvit.db'}")

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            name = getattr(cause, "sqlite_errorname", None) or ""
            if self._file and (name.startswith(_DAMAGED) or str(cause).startswith("Could not decode to UTF-8")):
                raise self.damaged(str(cause)) from error
            if are_used_up():  # SQLite only says that it cannot open a file
                raise TooManyOpenFiles(f"database {self._engine.url}: {cause}; {how_many()}") from error
            kind = DiskFull if name in _FULL else StorageFailed
            raise kind(f"database {self._engine.url}: {cause}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise self.damaged(f"a value cannot be read ({error})") from error

    def damaged(self, what: str, run: str = "*") -> Damaged:
        """The error that says so, and what to do: with a copy of any run, or of one."""
        return Damaged(
            remedy(self._file, what, run) if self._file else f"database {self._engine.url} is damaged: {what}"
        )

    def _sound(self, table: Table, rows: Iterable[Any]) -> Iterator[Any]:
        """The rows as they come. Raises Damaged at one that does not hold what was written to it."""
        for row in rows:
            if row.seal is not None and row.seal != _seal_of(table, row._asdict()):  # older versions wrote none
                raise self.damaged(f"the seal of a row of table {table.name!r} is broken")
            yield row

    def back_up(self, file: Path) -> bool:
        """Write a verified copy of the database to `file`, which is new; False where there is no file to copy.

        It is not synced.
        """
        if self._file is None:
            return False
        with self._transaction() as connection:
            raw: Any = connection.connection.driver_connection
            with closing(sqlite3.connect(file)) as copy:
                raw.backup(copy)
        if not is_whole(file):
            raise self.damaged("what can be read of it is not whole")
        return True

    # --- runs -----------------------------------------------------------------------------------------

    def create_run(self, run: str, config: dict[str, Any]) -> None:
        with self._transaction() as connection:
            connection.execute(
                _runs.insert().values(id=run, created_at=_now(), status="waiting", config=config, classes=[])
            )
            _seal(connection, _runs, _runs.c.id == run)

    def update_run(self, run: str, **values: Any) -> None:
        """Set status, classes, program, protocol, reason or corrections."""
        with self._transaction() as connection:
            connection.execute(update(_runs).where(_runs.c.id == run).values(**values))
            _seal(connection, _runs, _runs.c.id == run)

    def runs(self) -> list[RunRecord]:
        """Newest first."""
        with self._transaction() as connection:
            rows = connection.execute(select(_runs).order_by(_runs.c.created_at.desc(), _runs.c.id.desc()))
            return [
                RunRecord(
                    id=row.id,
                    created_at=row.created_at,
                    status=row.status,
                    config=row.config,
                    classes=tuple(row.classes or ()),
                    program=row.program,
                    protocol=row.protocol,
                    reason=row.reason,
                    corrections=row.corrections or {},
                )
                for row in self._sound(_runs, rows)
            ]

    def run(self, run: str) -> RunRecord:
        """Raises ConfigError when there is no such run, naming those that there are."""
        runs = self.runs()
        for record in runs:
            if record.id == run:
                return record
        if self._file and newest_copy(self._file, run):
            raise self.damaged(f"it does not know run {run!r}", run)
        known = ", ".join(record.id for record in runs[:5]) or "none yet"
        raise ConfigError(f"no run {run!r}; the newest runs are: {known}")

    # --- rounds ---------------------------------------------------------------------------------------

    def open_round(self, run: str, number: int, cohort: list[str], needed: int | None = None) -> None:
        """A round begins; or it asks another cohort, since the first gave nothing."""
        this = (_rounds.c.run == run, _rounds.c.round == number)
        with self._transaction() as connection:
            if connection.execute(select(_rounds.c.round).where(*this)).first():
                connection.execute(update(_rounds).where(*this).values(cohort=cohort, needed=needed))
            else:
                connection.execute(
                    _rounds.insert().values(
                        run=run, round=number, cohort=cohort, opened_at=_now(), evaluated=False, needed=needed
                    )
                )
            _seal(connection, _rounds, *this)

    def set_expected(self, run: str, number: int, expected: dict[str, Expected]) -> None:
        """What each device's training in a round is expected to cost."""
        self._update_round(run, number, expected=msgspec.to_builtins(expected))

    def close_round(self, run: str, number: int, state: SavedState, figures: dict[str, float]) -> None:
        self._update_round(run, number, closed_at=_now(), state=msgspec.to_builtins(state), figures=figures)

    def round_evaluated(self, run: str, number: int) -> None:
        self._update_round(run, number, evaluated=True)

    def _update_round(self, run: str, number: int, **values: Any) -> None:
        this = (_rounds.c.run == run, _rounds.c.round == number)
        with self._transaction() as connection:
            connection.execute(update(_rounds).where(*this).values(**values))
            _seal(connection, _rounds, *this)

    def rounds(self, run: str) -> list[RoundRecord]:
        with self._transaction() as connection:
            rows = connection.execute(select(_rounds).where(_rounds.c.run == run).order_by(_rounds.c.round))
            return [_round_record(row) for row in self._sound(_rounds, rows)]

    def round(self, run: str, number: int) -> RoundRecord | None:
        """One round; None when it was never opened."""
        with self._transaction() as connection:
            rows = connection.execute(select(_rounds).where(_rounds.c.run == run, _rounds.c.round == number))
            return next(map(_round_record, self._sound(_rounds, rows)), None)

    def figures(self, run: str) -> list[dict[str, float]]:
        """What each closed round noted of itself, in their order; the rest of a record grows with the devices."""
        query = select(_rounds.c.figures).where(_rounds.c.run == run, _rounds.c.closed_at.is_not(None))
        with self._transaction() as connection:
            return [row.figures or {} for row in connection.execute(query.order_by(_rounds.c.round))]

    def closed_rounds(self, run: str) -> list[int]:
        """Numbers of the rounds whose training is over, ascending."""
        query = select(_rounds.c.round).where(_rounds.c.run == run, _rounds.c.closed_at.is_not(None))
        with self._transaction() as connection:
            return [row.round for row in connection.execute(query.order_by(_rounds.c.round))]

    # --- tasks ----------------------------------------------------------------------------------------

    def add_tasks(self, run: str, tasks: Iterable[TaskRecord]) -> None:
        """Devices are asked to train, for the first time or again in the same round."""
        rows = [{"run": run, "asked_at": _now(), **task._asdict()} for task in tasks]
        if not rows:
            return
        this = [_tasks.c[key] == bindparam(f"this_{key}") for key in ("run", "round", "device")]
        with self._transaction() as connection:
            connection.execute(
                delete(_tasks).where(*this),
                [{f"this_{key}": row[key] for key in ("run", "round", "device")} for row in rows],
            )
            connection.execute(_tasks.insert(), rows)

    def end_tasks(self, run: str, tasks: Sequence[tuple[int, str]], outcome: str) -> None:
        """Tasks (round, device) are accepted, failed, declined, cancelled or lost; what each was first, it stays."""
        if not tasks:
            return
        this = (_tasks.c.run == run, _tasks.c.round == bindparam("number"), _tasks.c.device == bindparam("name"))
        with self._transaction() as connection:
            connection.execute(
                update(_tasks).where(*this, _tasks.c.outcome.is_(None)).values(outcome=outcome),
                [{"number": number, "name": device} for number, device in tasks],
            )

    def unanswered(self, run: str) -> list[TaskRecord]:
        """Tasks that devices are at work on, the newest last."""
        query = select(_tasks).where(_tasks.c.run == run, _tasks.c.outcome.is_(None)).order_by(_tasks.c.round)
        with self._transaction() as connection:
            return [TaskRecord(row.round, row.device, row.program, row.groups) for row in connection.execute(query)]

    def asked(self, run: str, before: int) -> dict[str, Asked]:
        """By device, how it was asked to train in the rounds before one."""
        query = select(_tasks.c.device, func.max(_tasks.c.round), func.count()).group_by(_tasks.c.device)
        with self._transaction() as connection:
            rows = connection.execute(query.where(_tasks.c.run == run, _tasks.c.round < before))
            return {device: Asked(last, times) for device, last, times in rows}

    # --- results --------------------------------------------------------------------------------------

    def add_result(self, device: str, result: Result, used_in: int | None = None) -> None:
        """An accepted result, for the server step of its round or of a later one; one that is there is not touched."""
        self.add_results([(device, result, used_in)])

    def add_results(self, results: Sequence[tuple[str, Result, int | None]]) -> None:
        """Accepted results, as `add_result` takes them, in one transaction: all of them are safe, or none."""
        if not results:
            return
        with self._transaction() as connection:
            there = _there(connection, [result for _, result, _ in results], [device for device, *_ in results])
            fresh = [
                {
                    "run": result.run, "round": result.round, "device": device, "kind": result.kind,
                    "samples": result.samples, "metrics": result.metrics, "use": msgspec.to_builtins(result.use),
                    "upload": result.upload.digest if result.upload else None, "received_at": _now(),
                    "used_in": used_in,
                }
                for device, result, used_in in results
                if (result.run, result.round, result.kind, device) not in there
            ]  # fmt: skip
            if fresh:
                connection.execute(_results.insert(), [row | {SEAL: _seal_of(_results, row)} for row in fresh])

    def drop_result(self, run: str, number: int, kind: TaskKind, device: str) -> None:
        """What a device brought cannot be used any more: it may bring it again."""
        key = (_results.c.run == run, _results.c.round == number, _results.c.device == device, _results.c.kind == kind)
        with self._transaction() as connection:
            connection.execute(delete(_results).where(*key))

    def has_result(self, run: str, number: int, kind: TaskKind, device: str) -> bool:
        """Whether a device's result was accepted."""
        with self._transaction() as connection:
            key = (_results.c.run == run, _results.c.round == number, _results.c.device == device)
            return (
                connection.execute(select(_results.c.device).where(*key, _results.c.kind == kind)).first() is not None
            )

    def results(self, run: str, round_number: int | None = None, kind: TaskKind | None = None) -> list[ResultRecord]:
        """Sorted by round and device."""
        query = select(_results).where(_results.c.run == run)
        if round_number is not None:
            query = query.where(_results.c.round == round_number)
        if kind is not None:
            query = query.where(_results.c.kind == kind)
        return self._results(query)

    def results_from(self, run: str, number: int) -> list[ResultRecord]:
        """Training results for the server step of a round, or of a later one; of whatever round they are."""
        used_in = func.coalesce(_results.c.used_in, _results.c.round)
        query = select(_results).where(_results.c.run == run, _results.c.kind == "train", used_in >= number)
        return self._results(query)

    def _results(self, query: Select[Any]) -> list[ResultRecord]:
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(_results.c.round, _results.c.device))
            return [
                ResultRecord(
                    row.run, row.round, row.device, row.kind, row.samples, row.metrics,
                    msgspec.convert(row.use, ResourceUse), row.upload, row.used_in or row.round,
                )
                for row in self._sound(_results, rows)
            ]  # fmt: skip

    def add_refusal(
        self,
        run: str,
        round_number: int | None,
        device: str,
        kind: str,
        reason: str,
        broke: BudgetKind | None = None,
    ) -> None:
        """Something that was not accepted: counted and shown, never fatal. `broke`: a device stopped by its budget."""
        with self._transaction() as connection:
            connection.execute(
                _refusals.insert().values(
                    run=run, round=round_number, device=device, kind=kind, reason=reason, at=_now(), broke=broke
                )
            )

    def refusals(self, run: str) -> list[RefusalRecord]:
        with self._transaction() as connection:
            rows = connection.execute(select(_refusals).where(_refusals.c.run == run).order_by(_refusals.c.id))
            return [RefusalRecord(row.round, row.device, row.kind, row.reason, row.at, row.broke) for row in rows]

    # --- faults of devices ----------------------------------------------------------------------------

    def add_strike(self, run: str, round_number: int, device: str, reason: str) -> int:
        """One a round at most. Returns how many the device has that led to no quarantine yet."""
        mine = (_strikes.c.run == run, _strikes.c.device == device)
        with self._transaction() as connection:
            if not connection.execute(select(_strikes.c.id).where(*mine, _strikes.c.round == round_number)).first():
                connection.execute(
                    _strikes.insert().values(
                        run=run, round=round_number, device=device, reason=reason, at=_now(), spent=False
                    )
                )
                _seal(connection, _strikes, *mine)
            return len(connection.execute(select(_strikes.c.id).where(*mine, _strikes.c.spent.is_(False))).all())

    def strikes(self, run: str) -> list[StrikeRecord]:
        with self._transaction() as connection:
            rows = connection.execute(select(_strikes).where(_strikes.c.run == run).order_by(_strikes.c.id))
            return [
                StrikeRecord(row.round, row.device, row.reason, row.at, row.spent)
                for row in self._sound(_strikes, rows)
            ]

    def add_quarantine(self, run: str, device: str, round_number: int, until_round: int | None, reason: str) -> None:
        """From now on the device's strikes are counted anew."""
        with self._transaction() as connection:
            connection.execute(
                _quarantines.insert().values(
                    run=run, device=device, round=round_number, until_round=until_round, reason=reason, at=_now()
                )
            )
            _seal(connection, _quarantines, _quarantines.c.run == run, _quarantines.c.device == device)
            _spend_strikes(connection, run, device)

    def quarantines(self, run: str) -> list[QuarantineRecord]:
        """Also those that are over."""
        with self._transaction() as connection:
            rows = connection.execute(select(_quarantines).where(_quarantines.c.run == run).order_by(_quarantines.c.id))
            return [
                QuarantineRecord(row.device, row.round, row.until_round, row.reason, row.at, row.released_at)
                for row in self._sound(_quarantines, rows)
            ]

    def release(self, run: str, device: str) -> bool:
        """End a device's quarantines and forget its strikes; False when it had neither."""
        held = (_quarantines.c.run == run, _quarantines.c.device == device, _quarantines.c.released_at.is_(None))
        with self._transaction() as connection:
            ended = connection.execute(update(_quarantines).where(*held).values(released_at=_now()))
            _seal(connection, _quarantines, *held[:2])
            return ended.rowcount + _spend_strikes(connection, run, device) > 0


# --- damage and copies ----------------------------------------------------------------------------------


def is_whole(file: Path) -> bool:
    """Whether a copy of the database, which nobody writes to, holds what was written to it."""
    address = f"file:{quote(str(file))}?mode=ro&immutable=1"
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True))
    try:
        with engine.connect() as connection:
            if connection.execute(text("PRAGMA integrity_check(1)")).scalar() != "ok":
                return False
            sealed = [table for table in _tables.sorted_tables if SEAL in table.columns]
            rows = ((table, row) for table in sealed for row in connection.execute(select(table)))
            return all(row.seal in (None, _seal_of(table, row._asdict())) for table, row in rows)
    except (SQLAlchemyError, ValueError):
        return False
    finally:
        engine.dispose()


def newest_copy(database: Path, run: str = "*") -> Path | None:
    """The newest copy of a damaged database that is whole, of any run or of one; see `coordinator.backups`."""
    made = {file: file.stat().st_mtime_ns for file in database.parent.glob(f"{run}/{COPIES}/round-*.db")}
    return next((file for file in sorted(made, key=lambda file: made[file], reverse=True) if is_whole(file)), None)


def remedy(database: Path, why: str, of_run: str = "*") -> str:
    """What is to be done about a damaged database: which copy of it is good, and how it is put back."""
    damaged = f"{database} is damaged: {why}"
    copy = newest_copy(database, of_run)
    if copy is None:
        return (
            f"{damaged}. There is no good copy of it in {database.parent}/RUN/{COPIES}: put back one of your own, or "
            f"move it away and begin anew (tensors of finished runs are in {database.parent}/RUN/model.safetensors)"
        )
    run, number = copy.parent.parent.name, copy.stem.partition("-")[2]
    return (
        f"{damaged}. The newest good copy is {copy}, made after round {number} of run {run}. While no coordinator "
        f"serves this folder, put it back: mv {database} {database}.damaged; rm -f {database}-wal {database}-shm; "
        f"cp {copy} {database}; then: coordinator start --resume {run} --out {database.parent}"
    )


def _spend_strikes(connection: Connection, run: str, device: str) -> int:
    mine = (_strikes.c.run == run, _strikes.c.device == device, _strikes.c.spent.is_(False))
    spent = connection.execute(update(_strikes).where(*mine).values(spent=True)).rowcount
    _seal(connection, _strikes, *mine[:2])
    return spent


def _seal(connection: Connection, table: Table, *where: ColumnElement[bool]) -> None:
    """After rows were written."""
    for row in connection.execute(select(table).where(*where)).all():
        this = [column == row._mapping[column.name] for column in table.primary_key]
        connection.execute(update(table).where(*this).values(seal=_seal_of(table, row._asdict())))


def _seal_of(table: Table, row: Mapping[str, Any]) -> str:
    values = [row.get(column.name) for column in table.columns if column.name != SEAL]
    return digest_of(json.dumps(values, sort_keys=True).encode())


def _round_record(row: Any) -> RoundRecord:
    return RoundRecord(
        row.run, row.round, row.cohort, row.opened_at, row.closed_at, row.evaluated,
        msgspec.convert(row.state, SavedState) if row.state else None, row.figures or {},
        msgspec.convert(row.expected or {}, dict[str, Expected]), row.needed,
    )  # fmt: skip


def _there(connection: Connection, results: Sequence[Result], devices: Sequence[str]) -> set[tuple[Any, ...]]:
    """Those of the devices' results that are in the store already: (run, round, kind, device)."""
    columns = (_results.c.run, _results.c.round, _results.c.kind, _results.c.device)
    query = select(*columns).where(
        _results.c.run.in_({result.run for result in results}),
        _results.c.round.in_({result.round for result in results}),
        _results.c.device.in_(devices),
    )
    return {tuple(row) for row in connection.execute(query)}


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a round that devices were told about must survive a power cut
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()
