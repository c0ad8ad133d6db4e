"""The runs of a record, and the queue of a service."""

from typing import Any

from sqlalchemy import and_, case, delete, func, not_, select, tuple_, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from coordinator.record.copies import has_lost
from coordinator.record.database import Database
from coordinator.record.rows import insert, seal, without_zero_bytes
from coordinator.record.tables import (
    AUDIT,
    ENDED,
    EXPECTATIONS,
    OF_ALL_RUNS,
    REFUSALS,
    RESULTS,
    ROUNDS,
    RUNS,
    TABLES,
    TASKS,
    RunRecord,
    RunStatus,
    now,
)
from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError
from fedvit.wire.topics import is_name


class RecordedRuns:
    """Runs: their state, their configuration, and what the operator asks of them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, run: str, config: dict[str, Any], broker: dict[str, Any] | None = None) -> None:
        """Add a run that begins now. Raises ConfigError if it exists."""
        self._add(RunRecord(run, now(), "waiting", config, broker=broker or {}))

    def submit(
        self, run: str, config: dict[str, Any], *, priority: int | None = None, starts_at: str | None = None
    ) -> None:
        """Add a run to the queue of a service. Raises ConfigError if it exists."""
        at = now()
        self._add(RunRecord(run, at, "queued", config, submitted_at=at, priority=priority or None, starts_at=starts_at))

    def _add(self, record: RunRecord) -> None:
        with self._database.transaction() as connection:
            try:
                insert(connection, RUNS, [record])
            except IntegrityError:  # another process added the name after this one had looked for it
                raise make_exists_error(record.id) from None

    def read_submitted(self) -> list[RunRecord]:
        """Return a service's runs that have not ended: first those that have begun, then the queue.

        Both are by submission; in the queue a higher priority comes first."""
        waiting = RUNS.c.status.in_(("queued", "waiting", "running", "interrupted"))
        query = select(RUNS).where(RUNS.c.submitted_at.is_not(None), waiting)
        queued = RUNS.c.status == "queued"
        priority = case((queued, func.coalesce(RUNS.c.priority, 0)), else_=0)
        order = (queued, priority.desc(), RUNS.c.submitted_at, RUNS.c.id)
        return self._database.read(RunRecord, RUNS, query.order_by(*order))

    def read_queue(self) -> list[str]:
        """Return when each queued run was submitted (ISO 8601, UTC), the oldest first."""
        query = select(RUNS.c.submitted_at).where(RUNS.c.status == "queued").order_by(RUNS.c.submitted_at)
        return [row.submitted_at for row in self._database.fetch(query)]

    def take_from_queue(self, run: str, config: dict[str, Any], broker: dict[str, Any]) -> bool:
        """Begin a queued run with this configuration; return whether it was still queued."""
        queued = (RUNS.c.id == run, RUNS.c.status == "queued")
        values = {"status": "waiting", "config": config, "broker": broker}
        with self._database.transaction() as connection:
            taken = connection.execute(update(RUNS).where(*queued).values(**values)).rowcount == 1
            seal(connection, RUNS, RUNS.c.id == run)
            return taken

    def retry(self, run: str, *, has_begun: bool) -> bool:
        """Let a service serve a failed run again, from the queue unless it has begun; return whether it had failed."""
        failed = (RUNS.c.id == run, RUNS.c.status == "failed")
        values = {"status": "interrupted" if has_begun else "queued", "reason": None}
        with self._database.transaction() as connection:
            changed = connection.execute(update(RUNS).where(*failed).values(**values)).rowcount == 1
            seal(connection, RUNS, RUNS.c.id == run)
            return changed

    def cancel(self, run: str) -> None:
        """Request the end of a run; a queued run is cancelled at once."""
        queued = (RUNS.c.id == run, RUNS.c.status == "queued")
        with self._database.transaction() as connection:
            connection.execute(update(RUNS).where(*queued).values(status="cancelled"))
            _update(connection, run, cancelled_at=now())

    def is_cancelled(self, run: str) -> bool:
        """Return whether the operator requested the run's end."""
        return self._database.fetch_value(select(RUNS.c.cancelled_at).where(RUNS.c.id == run)) is not None

    def pause(self, run: str, *, paused: bool) -> None:
        """Pause a run, or let it continue."""
        with self._database.transaction() as connection:
            _update(connection, run, paused_at=func.coalesce(RUNS.c.paused_at, now()) if paused else None)

    def is_paused(self, run: str) -> bool:
        """Return whether the operator paused the run."""
        return self._database.fetch_value(select(RUNS.c.paused_at).where(RUNS.c.id == run)) is not None

    def update(self, run: str, **values: Any) -> None:
        """Set status, config, broker, classes, program, protocol, reason or corrections."""
        with self._database.transaction() as connection:
            _update(connection, run, **values)

    def read_all(self) -> list[RunRecord]:
        """Return all runs, the newest first."""
        return self._database.read(RunRecord, RUNS, select(RUNS).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()))

    def count(self) -> dict[RunStatus, int]:
        """Return the number of runs by status."""
        query = select(RUNS.c.status, func.count()).group_by(RUNS.c.status)
        return {row[0]: row[1] for row in self._database.fetch(query)}

    def read(self, run: str) -> RunRecord:
        """Return a run. Raises ConfigError, which names existing runs, if the record does not have it."""
        for record in self._database.read(RunRecord, RUNS, select(RUNS).where(RUNS.c.id == run)):
            return record
        if self._database.file and has_lost(self._database.file, run):
            raise self._database.make_damaged_error(f"it does not know run {run!r}", run)
        names = [record.id for record in self.read_all()]
        near, newest = did_you_mean(run, names), ", ".join(names[:5]) or "none yet"
        raise ConfigError("FV1601", f"no run {run!r}{near or ';'} {'The' if near else 'the'} newest runs are: {newest}")

    def has_ended(self, run: str) -> bool:
        """Return whether the run exists and will not be resumed. A device names it: PostgreSQL refuses some texts."""
        return is_name(run) and self._database.fetch_value(select(RUNS.c.status).where(RUNS.c.id == run)) in ENDED

    def remove(self, run: str) -> None:
        """Delete everything that the record has of a run."""
        with self._database.transaction() as connection:
            for table in reversed([table for table in TABLES.sorted_tables if table not in (*OF_ALL_RUNS, AUDIT)]):
                connection.execute(delete(table).where((table.c.id if table is RUNS else table.c.run) == run))

    def thin(self, run: str, before: int, *, keep: int = 0) -> None:
        """Remove details of rounds before a closed round: cohorts, states, answered tasks, results, refusals, and
        accuracies by device. Totals, figures, strikes, what is needed to continue (also the newest answer of each
        device, by which cohorts are selected), and the state of round `keep` are kept."""
        with self._database.transaction() as connection:
            thinned = connection.execute(select(RUNS.c.thinned).where(RUNS.c.id == run)).scalar() or 0
            closed = select(ROUNDS.c.round, ROUNDS.c.opened_at).where(
                ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None), ROUNDS.c.round <= before
            )
            oldest = connection.execute(closed.order_by(ROUNDS.c.round.desc())).first()
            if oldest is None or oldest.round <= thinned:
                return
            before, opened_at = oldest
            old = and_(ROUNDS.c.run == run, ROUNDS.c.round >= thinned, ROUNDS.c.round < before)
            connection.execute(update(ROUNDS).where(old, ROUNDS.c.round != keep).values(state=None))
            connection.execute(update(ROUNDS).where(old).values(cohort=[], accuracy=None))
            seal(connection, ROUNDS, old)
            _delete_details(connection, run, before, opened_at)
            _update(connection, run, thinned=before)


def make_exists_error(run: str) -> ConfigError:
    """Make the error of a new run whose name is taken."""
    return ConfigError("FV1613", f"run {run!r} exists already; resume it with --resume {run}, or choose another --run")


def _update(connection: Connection, run: str, **values: Any) -> None:
    connection.execute(update(RUNS).where(RUNS.c.id == run).values(**without_zero_bytes(values)))
    seal(connection, RUNS, RUNS.c.id == run)


def _delete_details(connection: Connection, run: str, before: int, opened_at: str) -> None:
    """Delete rows of rounds before a round, which was opened at this time."""
    expected = select(TASKS.c.expected).where(TASKS.c.run == run, TASKS.c.expected.is_not(None))
    trained = and_(RESULTS.c.run == run, RESULTS.c.kind == "train", RESULTS.c.used_in <= before)
    newest = select(RESULTS.c.device, func.max(RESULTS.c.used_in)).where(trained).group_by(RESULTS.c.device)
    is_newest = and_(RESULTS.c.kind == "train", tuple_(RESULTS.c.device, RESULTS.c.used_in).in_(newest))
    for statement in (
        delete(RESULTS).where(RESULTS.c.run == run, RESULTS.c.used_in < before, not_(is_newest)),
        delete(TASKS).where(TASKS.c.run == run, TASKS.c.round < before, TASKS.c.outcome.is_not(None)),
        delete(REFUSALS).where(REFUSALS.c.run == run, REFUSALS.c.round < before),
        delete(REFUSALS).where(REFUSALS.c.run == run, REFUSALS.c.round.is_(None), REFUSALS.c.at < opened_at),
        delete(EXPECTATIONS).where(EXPECTATIONS.c.run == run, EXPECTATIONS.c.id.not_in(expected)),
    ):
        connection.execute(statement)
