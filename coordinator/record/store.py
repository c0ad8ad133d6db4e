"""The record: runs, rounds and results in SQL, written before anything that depends on them is sent.

SQLite by default (write-ahead log, synced at commit), or PostgreSQL, whose address then stands in a file of the folder
of runs. Tensors are blobs; the record holds their digests. The time of a round's queries depends on the number of its
devices and not on that of earlier rounds: totals of rounds and devices are computed when a round is closed and
evaluated.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import JSON, ColumnElement, and_, bindparam, case, cast, delete, func, select, type_coerce, update
from sqlalchemy.engine import Connection

from coordinator.record.closing import (
    add_broken,
    asked_in,
    devices_of,
    results_of,
    sum_up_evaluation,
    sum_up_training,
    this_round,
)
from coordinator.record.copies import has_lost
from coordinator.record.database import Database
from coordinator.record.leadership import check_term
from coordinator.record.rows import (
    filled_fields,
    insert,
    read_records,
    read_rows,
    record_of,
    replace,
    seal,
    without_infinite,
    write,
)
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
    STRIKES,
    TABLES,
    TASKS,
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
)
from fedvit.blobs import digest_of
from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError
from fedvit.resources import BudgetKind, ResourceUse
from fedvit.wire.messages import Result, TaskKind
from profiles.prediction import Expected

LOGS_KEPT = 20
"""Logs of one device in one run that are kept: more would let the device fill the disk."""


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


class Store(Database):
    """What the coordinator asks of the record and writes into it."""

    def __init__(self, url: str, *, check: bool = True, reads_only: bool = False) -> None:
        super().__init__(url, check=check, reads_only=reads_only)
        # SQLite does not notice a lost journal
        if self._file and not self.runs() and has_lost(self._file):
            raise self.damaged("it holds no run")

    # --- runs -----------------------------------------------------------------------------------------

    def create_run(self, run: str, config: dict[str, Any], broker: dict[str, Any] | None = None) -> None:
        """Add a run that begins now."""
        with self._transaction() as connection:
            insert(connection, RUNS, [RunRecord(run, now(), "waiting", config, broker=broker or {})])

    def submit_run(self, run: str, config: dict[str, Any]) -> None:
        """Add a run to the queue of a service."""
        at = now()
        with self._transaction() as connection:
            insert(connection, RUNS, [RunRecord(run, at, "queued", config, submitted_at=at)])

    def submitted(self) -> list[RunRecord]:
        """Runs of a service that have not ended: those that have begun, then the queue, in order of submission."""
        waiting = select(RUNS).where(
            RUNS.c.submitted_at.is_not(None), RUNS.c.status.in_(("queued", "waiting", "running", "interrupted"))
        )
        order = (RUNS.c.status == "queued", RUNS.c.submitted_at, RUNS.c.id)
        with self._transaction() as connection:
            return list(read_records(connection, RunRecord, RUNS, waiting.order_by(*order)))

    def take_from_queue(self, run: str, config: dict[str, Any], broker: dict[str, Any]) -> bool:
        """Begin a queued run with this configuration; False if it is no longer queued."""
        with self._transaction() as connection:
            queued = (RUNS.c.id == run, RUNS.c.status == "queued")
            values = {"status": "waiting", "config": config, "broker": broker}
            taken = connection.execute(update(RUNS).where(*queued).values(**values)).rowcount == 1
            seal(connection, RUNS, RUNS.c.id == run)
            return taken

    def cancel_run(self, run: str) -> None:
        """Request the end of a run; a queued run is cancelled at once."""
        with self._transaction() as connection:
            queued = (RUNS.c.id == run, RUNS.c.status == "queued")
            connection.execute(update(RUNS).where(*queued).values(status="cancelled"))
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(cancelled_at=now()))
            seal(connection, RUNS, RUNS.c.id == run)

    def is_cancelled(self, run: str) -> bool:
        """Whether the operator requested the run's end."""
        with self._transaction() as connection:
            return connection.execute(select(RUNS.c.cancelled_at).where(RUNS.c.id == run)).scalar() is not None

    def pause_run(self, run: str, *, paused: bool) -> None:
        """Pause a run, or let it continue."""
        with self._transaction() as connection:
            at = func.coalesce(RUNS.c.paused_at, now()) if paused else None
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(paused_at=at))
            seal(connection, RUNS, RUNS.c.id == run)

    def is_paused(self, run: str) -> bool:
        """Whether the operator paused the run."""
        with self._transaction() as connection:
            return connection.execute(select(RUNS.c.paused_at).where(RUNS.c.id == run)).scalar() is not None

    def update_run(self, run: str, **values: Any) -> None:
        """Set status, config, broker, classes, program, protocol, reason or corrections."""
        with self._transaction() as connection:
            connection.execute(update(RUNS).where(RUNS.c.id == run).values(**values))
            seal(connection, RUNS, RUNS.c.id == run)

    def runs(self) -> list[RunRecord]:
        """All runs, newest first."""
        with self._transaction() as connection:
            query = select(RUNS).order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc())
            return list(read_records(connection, RunRecord, RUNS, query))

    def count_runs(self) -> dict[RunStatus, int]:
        """Number of runs by status."""
        with self._transaction() as connection:
            query = select(RUNS.c.status, func.count()).group_by(RUNS.c.status)
            return {row[0]: row[1] for row in connection.execute(query)}

    def run(self, run: str) -> RunRecord:
        """Raises ConfigError if there is no such run, naming existing runs."""
        with self._transaction() as connection:
            found = read_records(connection, RunRecord, RUNS, select(RUNS).where(RUNS.c.id == run))
            if (record := next(found, None)) is not None:
                return record
        if self._file and has_lost(self._file, run):
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
        this = this_round(run, number)
        with self._transaction() as connection:
            if connection.execute(select(ROUNDS.c.round).where(this)).first():
                connection.execute(update(ROUNDS).where(this).values(cohort=cohort, needed=needed))
                seal(connection, ROUNDS, this)
            else:
                insert(connection, ROUNDS, [RoundRecord(run, number, cohort, at or now(), needed=needed)])

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
            this = this_round(run, number)
            values = {"closed_at": at or now(), "state": msgspec.to_builtins(state), "figures": figures}
            connection.execute(update(ROUNDS).where(this).values(**values))
            sum_up_training(connection, run, number, asked, results)

    def round_evaluated(self, run: str, number: int, results: Sequence[ResultRecord] | None = None) -> None:
        """Close the evaluation of a round, with these results; by default those in the record."""
        with self._transaction() as connection:
            this = this_round(run, number)
            connection.execute(update(ROUNDS).where(this).values(evaluated=True))
            sum_up_evaluation(connection, run, number, results)

    def asked_in(self, run: str, number: int) -> list[str]:
        """Devices with a training task in a round."""
        with self._transaction() as connection:
            return asked_in(connection, run, number)

    def rounds(self, run: str) -> list[RoundRecord]:
        """All rounds with their details; the cost grows with the run."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(ROUNDS.c.run == run).order_by(ROUNDS.c.round)
            return list(read_records(connection, RoundRecord, ROUNDS, query))

    def round(self, run: str, number: int) -> RoundRecord | None:
        """One round; None if it was never opened."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(this_round(run, number))
            return next(read_records(connection, RoundRecord, ROUNDS, query), None)

    def newest_closed(self, run: str, before: int | None = None) -> RoundRecord | None:
        """The newest closed round, or the newest before round `before`; None if there is none."""
        query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_not(None))
        if before is not None:
            query = query.where(ROUNDS.c.round < before)
        with self._transaction() as connection:
            query = query.order_by(ROUNDS.c.round.desc()).limit(1)
            return next(read_records(connection, RoundRecord, ROUNDS, query), None)

    def open_rounds(self, run: str) -> list[RoundRecord]:
        """Open rounds: at most one, unless an older copy of the record was restored."""
        with self._transaction() as connection:
            query = select(ROUNDS).where(ROUNDS.c.run == run, ROUNDS.c.closed_at.is_(None)).order_by(ROUNDS.c.round)
            return list(read_records(connection, RoundRecord, ROUNDS, query))

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
        finite = without_infinite(ROUNDS.c.figures)
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
            seal(connection, ROUNDS, old)
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
            seal(connection, RUNS, RUNS.c.id == run)

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
            replace(connection, TASKS, rows)

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
            return [record_of(TaskRecord, row) for row in read_rows(connection, query)]

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
                for row in read_rows(connection, query.order_by(TASKS.c.round, TASKS.c.device))
            ]

    def asked(self, run: str) -> dict[str, Asked]:
        """By device, how often and when it was asked to train, in closed rounds."""
        query = select(DEVICES.c.device, DEVICES.c.last_asked, DEVICES.c.times_asked)
        with self._transaction() as connection:
            rows = connection.execute(query.where(DEVICES.c.run == run, DEVICES.c.times_asked > 0))
            return {device: Asked(last, times) for device, last, times in rows}

    # --- results --------------------------------------------------------------------------------------

    def add_results(
        self,
        results: Sequence[tuple[str, Result, int | None]],
        times: Mapping[str, TaskTimes] = MappingProxyType({}),
    ) -> list[ResultRecord]:
        """Store accepted results (device, result, round whose server step uses it; None: its own), and end their tasks,
        in one transaction. An existing result is not changed. `times`: of the tasks, by device. Returns the results as
        the record has them, unless it had one already."""
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
                    "use": filled_fields(record.use),
                    "by_class": record.by_class or None,
                    "received_at": at,
                }
                for record in records
            ]
            if not self._file:
                there = _existing(connection, [result for _, result, _ in results], [device for device, *_ in results])
                rows = [row for row in rows if (row["run"], row["round"], row["kind"], row["device"]) not in there]
            if rows:
                write(connection, RESULTS, rows, "IGNORE")
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
            return list(read_records(connection, ResultRecord, RESULTS, query.order_by(RESULTS.c.round)))

    def results(self, run: str, round_number: int | None = None, kind: TaskKind | None = None) -> list[ResultRecord]:
        """Results sorted by round and device; for a whole run the cost grows with the run."""
        query = select(RESULTS).where(RESULTS.c.run == run)
        if round_number is not None:
            query = query.where(RESULTS.c.round == round_number)
        if kind is not None:
            query = query.where(RESULTS.c.kind == kind)
        with self._transaction() as connection:
            query = query.order_by(RESULTS.c.round, RESULTS.c.device)
            return list(read_records(connection, ResultRecord, RESULTS, query))

    def used_in(self, run: str, number: int, kind: TaskKind = "train") -> list[ResultRecord]:
        """Results that the server step, or the evaluation, of a round uses, including late ones."""
        with self._transaction() as connection:
            return results_of(connection, run, number, kind)

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
            return devices_of(connection, run, [device])[device]

    def devices(self, run: str) -> list[DeviceRecord]:
        """Totals of all devices from closed rounds, by name."""
        query = select(DEVICES).where(DEVICES.c.run == run).order_by(DEVICES.c.device)
        with self._transaction() as connection:
            return list(read_records(connection, DeviceRecord, DEVICES, query))

    def note_software(self, run: str, versions: Mapping[str, str]) -> None:
        """Store the software versions of devices."""
        if not versions:
            return
        with self._transaction() as connection:
            known = devices_of(connection, run, versions)
            changed = [msgspec.structs.replace(known[name], software=version) for name, version in versions.items()]
            replace(connection, DEVICES, [msgspec.to_builtins(record) for record in changed])

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
            insert(connection, LOGS, [log])
            newest = select(LOGS.c.id).where(*mine).order_by(LOGS.c.id.desc()).limit(LOGS_KEPT)
            connection.execute(delete(LOGS).where(*mine, LOGS.c.id.not_in(newest)))

    def logs(self, device: str, run: str | None = None) -> list[DeviceLog]:
        """Logs of a device in one run or in all, the newest last."""
        query = select(LOGS).where(LOGS.c.device == device).order_by(LOGS.c.at, LOGS.c.id)
        if run is not None:
            query = query.where(LOGS.c.run == run)
        with self._transaction() as connection:
            return list(read_records(connection, DeviceLog, LOGS, query))

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
            insert(connection, REFUSALS, [refusal], run=run)
            if broke:
                add_broken(connection, run, device, broke)

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
            found = list(read_records(connection, RefusalRecord, REFUSALS, query.limit(newest)))
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
                insert(connection, STRIKES, [StrikeRecord(round_number, device, reason, now(), False)], run=run)
                seal(connection, STRIKES, *mine)  # the seal covers the id, too
            return len(connection.execute(select(STRIKES.c.id).where(*mine, STRIKES.c.spent.is_(False))).all())

    def strikes(self, run: str) -> list[StrikeRecord]:
        with self._transaction() as connection:
            query = select(STRIKES).where(STRIKES.c.run == run).order_by(STRIKES.c.id)
            return list(read_records(connection, StrikeRecord, STRIKES, query))

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
            insert(connection, QUARANTINES, [made], run=run)
            seal(connection, QUARANTINES, QUARANTINES.c.run == run, QUARANTINES.c.device == device)
            _spend_strikes(connection, run, device)

    def quarantines(self, run: str) -> list[QuarantineRecord]:
        """All quarantines, including ended ones."""
        with self._transaction() as connection:
            query = select(QUARANTINES).where(QUARANTINES.c.run == run).order_by(QUARANTINES.c.id)
            return list(read_records(connection, QuarantineRecord, QUARANTINES, query))

    def quarantined(self, run: str, round_number: int) -> dict[str, QuarantineRecord]:
        """By device, the quarantines that hold in a round."""
        return {record.device: record for record in self.quarantines(run) if record.holds(round_number)}

    def release(self, run: str, device: str) -> bool:
        """End a device's quarantines and reset its strikes; False if it had neither."""
        held = (QUARANTINES.c.run == run, QUARANTINES.c.device == device, QUARANTINES.c.released_at.is_(None))
        with self._transaction() as connection:
            ended = connection.execute(update(QUARANTINES).where(*held).values(released_at=now()))
            seal(connection, QUARANTINES, *held[:2])
            return ended.rowcount + _spend_strikes(connection, run, device) > 0


def _this_result(run: str, number: int, kind: TaskKind, device: str) -> ColumnElement[bool]:
    key = (RESULTS.c.run == run, RESULTS.c.round == number, RESULTS.c.device == device, RESULTS.c.kind == kind)
    return and_(*key)


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


def _spend_strikes(connection: Connection, run: str, device: str) -> int:
    mine = (STRIKES.c.run == run, STRIKES.c.device == device, STRIKES.c.spent.is_(False))
    spent = connection.execute(update(STRIKES).where(*mine).values(spent=True)).rowcount
    seal(connection, STRIKES, *mine[:2])
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
