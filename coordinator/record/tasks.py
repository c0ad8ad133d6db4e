"""Training tasks of a record, and the results of training and evaluation."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, and_, bindparam, delete, func, select, update
from sqlalchemy.engine import Connection

from coordinator.record.closing import find_asked, read_used_results
from coordinator.record.database import Database
from coordinator.record.leadership import check_term
from coordinator.record.rows import drop_empty_fields, read_rows, record_of, replace, write
from coordinator.record.tables import EXPECTATIONS, RESULTS, TASKS, ResultRecord, TaskRecord, TaskTimes, now
from fedvit.blobs import digest_of
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Result, TaskKind
from profiles.prediction import Expected

_EXPECTED = and_(EXPECTATIONS.c.run == TASKS.c.run, EXPECTATIONS.c.id == TASKS.c.expected)


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


class RecordedTasks:
    """Training tasks and their ends, and accepted results."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run: str, tasks: Iterable[TaskRecord]) -> None:
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
        with self._database.transaction() as connection:
            ids = EXPECTATIONS.c.run == run, EXPECTATIONS.c.id.in_(list(contents))
            stored = set(connection.execute(select(EXPECTATIONS.c.id).where(*ids)).scalars())
            new = [
                {"run": run, "id": name, "content": msgspec.json.decode(content)}
                for name, content in contents.items()
                if name not in stored
            ]
            if new:
                connection.execute(EXPECTATIONS.insert(), new)
            replace(connection, TASKS, rows)

    def end(
        self,
        run: str,
        tasks: Sequence[tuple[int, str]],
        outcome: str,
        times: Mapping[str, TaskTimes] = MappingProxyType({}),
    ) -> None:
        """End tasks (round, device) with a `TaskState`; the first end of a task is kept. `times`: by device."""
        if not tasks:
            return
        with self._database.transaction() as connection:
            _end_tasks(connection, [(run, number, device) for number, device in tasks], outcome, times)

    def set_attempt(self, run: str, round_number: int, device: str, attempt: int) -> None:
        """Store the number of a new attempt at a task."""
        this = (TASKS.c.run == run, TASKS.c.round == round_number, TASKS.c.device == device)
        with self._database.transaction() as connection:
            connection.execute(update(TASKS).where(*this).values(attempt=attempt))

    def read_unanswered(self, run: str, round_number: int | None = None) -> list[TaskRecord]:
        """Return tasks under way, of one round or of all, the newest last."""
        columns = (TASKS.c.round, TASKS.c.device, TASKS.c.program, TASKS.c.groups, TASKS.c.attempt)
        query = select(*columns, EXPECTATIONS.c.content.label("expected")).outerjoin(EXPECTATIONS, _EXPECTED)
        query = query.where(TASKS.c.run == run, TASKS.c.outcome.is_(None)).order_by(TASKS.c.round)
        if round_number is not None:
            query = query.where(TASKS.c.round == round_number)
        with self._database.transaction() as connection:
            return [record_of(TaskRecord, row) for row in read_rows(connection, query)]

    def read_expected(self, run: str) -> dict[tuple[int, str], Expected]:
        """Return the predicted cost of each training task, by (round, device)."""
        query = select(TASKS.c.round, TASKS.c.device, TASKS.c.expected).where(TASKS.c.run == run)
        contents = select(EXPECTATIONS.c.id, EXPECTATIONS.c.content).where(EXPECTATIONS.c.run == run)
        with self._database.transaction() as connection:
            costs = {name: msgspec.convert(content, Expected) for name, content in connection.execute(contents)}
            rows = connection.execute(query.join(EXPECTATIONS, _EXPECTED))
            return {(number, device): costs[name] for number, device, name in rows}

    def read_histories(self, run: str, rounds: Sequence[int], device: str | None = None) -> list[TaskHistory]:
        """Return the training tasks of these rounds, of all devices or one, with their accepted results.

        It reads by key, so that the time does not depend on the run's other rounds."""
        answer = and_(
            RESULTS.c.run == TASKS.c.run, RESULTS.c.round == TASKS.c.round, RESULTS.c.device == TASKS.c.device,
            RESULTS.c.kind == "train",
        )  # fmt: skip
        query = select(
            TASKS.c.round, TASKS.c.device, TASKS.c.asked_at, TASKS.c.attempt, TASKS.c.outcome,
            *(TASKS.c[name] for name in TaskTimes._fields), EXPECTATIONS.c.content.label("expected"),
            RESULTS.c.received_at, RESULTS.c.used_in, RESULTS.c.use,
        ).outerjoin(EXPECTATIONS, _EXPECTED).outerjoin(RESULTS, answer)  # fmt: skip
        query = query.where(TASKS.c.run == run, TASKS.c.round.in_(rounds))
        if device is not None:
            query = query.where(TASKS.c.device == device)
        with self._database.transaction() as connection:
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

    def list_asked(self, run: str, number: int) -> list[str]:
        """Return devices with a training task in a round."""
        with self._database.transaction() as connection:
            return find_asked(connection, run, number)

    def add_results(
        self,
        results: Sequence[tuple[str, Result, int | None]],
        times: Mapping[str, TaskTimes] = MappingProxyType({}),
    ) -> list[ResultRecord]:
        """Store accepted results, and end their tasks, in one transaction. An existing result is not changed.

        `results`: device, result, and the round whose server step uses it (None: its own); `times`: of the tasks, by
        device. Returns the results as rows."""
        if not results:
            return []
        with self._database.transaction() as connection:
            if self._database.term:  # they are acknowledged even when another leader has written all of them
                check_term(connection, self._database.term)
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
                    "use": drop_empty_fields(record.use),
                    "by_class": record.by_class or None,
                    "received_at": at,
                }
                for record in records
            ]
            if not self._database.file:
                stored = _find_stored(
                    connection, [result for _, result, _ in results], [device for device, *_ in results]
                )
                rows = [row for row in rows if (row["run"], row["round"], row["kind"], row["device"]) not in stored]
            if rows:
                write(connection, RESULTS, rows, "IGNORE")
            return records

    def drop_result(self, run: str, number: int, kind: TaskKind, device: str) -> None:
        """Delete a result of an open round that cannot be used, so that its device can send another."""
        with self._database.transaction() as connection:
            connection.execute(delete(RESULTS).where(_this_result(run, number, kind, device)))

    def has_result(self, run: str, number: int, kind: TaskKind, device: str) -> bool:
        """Return whether a device's result was accepted."""
        query = select(RESULTS.c.device).where(_this_result(run, number, kind, device))
        return self._database.fetch_value(query) is not None

    def read_received(self, run: str, number: int, kind: TaskKind) -> dict[str, str]:
        """Return when each device's result of a round was stored (ISO 8601, UTC)."""
        query = select(RESULTS.c.device, RESULTS.c.received_at).where(
            RESULTS.c.run == run, RESULTS.c.round == number, RESULTS.c.kind == kind
        )
        return {row.device: row.received_at for row in self._database.fetch(query)}

    def read_evaluations(self, run: str, rounds: Sequence[int], device: str) -> list[ResultRecord]:
        """Return a device's evaluations of these rounds, by key: the time does not depend on the run's length."""
        query = select(RESULTS).where(
            RESULTS.c.run == run, RESULTS.c.round.in_(rounds), RESULTS.c.device == device, RESULTS.c.kind == "evaluate"
        )
        return self._database.read(ResultRecord, RESULTS, query.order_by(RESULTS.c.round))

    def read_results(
        self, run: str, round_number: int | None = None, kind: TaskKind | None = None
    ) -> list[ResultRecord]:
        """Return results sorted by round and device; for a whole run the cost grows with the run."""
        query = select(RESULTS).where(RESULTS.c.run == run)
        if round_number is not None:
            query = query.where(RESULTS.c.round == round_number)
        if kind is not None:
            query = query.where(RESULTS.c.kind == kind)
        return self._database.read(ResultRecord, RESULTS, query.order_by(RESULTS.c.round, RESULTS.c.device))

    def read_used_in(self, run: str, number: int, kind: TaskKind = "train") -> list[ResultRecord]:
        """Return results that the server step, or the evaluation, of a round uses, including late ones."""
        with self._database.transaction() as connection:
            return read_used_results(connection, run, number, kind)

    def read_newest_used(self, run: str, number: int) -> dict[str, ResultRecord]:
        """Return by device the newest training result that a server step before round `number` used."""
        used = RESULTS.c.run == run, RESULTS.c.kind == "train", RESULTS.c.used_in < number
        newest = select(RESULTS.c.device, func.max(RESULTS.c.used_in).label("used_in")).where(*used)
        last = newest.group_by(RESULTS.c.device).subquery()
        query = select(RESULTS).join(
            last, and_(last.c.device == RESULTS.c.device, last.c.used_in == RESULTS.c.used_in, *used)
        )
        found = self._database.read(ResultRecord, RESULTS, query.order_by(RESULTS.c.round))
        return {result.device: result for result in found}

    def find_answered(self, run: str, number: int, kind: TaskKind) -> set[str]:
        """Return devices with a result of a round, whichever round it counts in."""
        query = select(RESULTS.c.device).where(RESULTS.c.run == run, RESULTS.c.round == number, RESULTS.c.kind == kind)
        return {row[0] for row in self._database.fetch(query)}

    def find_counted(self, run: str, number: int) -> set[str]:
        """Return devices with a training result for the server step of a round."""
        query = select(RESULTS.c.device).where(
            RESULTS.c.run == run, RESULTS.c.used_in == number, RESULTS.c.kind == "train"
        )
        return {row[0] for row in self._database.fetch(query)}

    def find_uploads_since(self, run: str, number: int) -> set[str]:
        """Return digests of uploads for the server steps of a round and all later ones."""
        query = select(RESULTS.c.upload).where(
            RESULTS.c.run == run, RESULTS.c.used_in >= number, RESULTS.c.kind == "train", RESULTS.c.upload.is_not(None)
        )
        return {row[0] for row in self._database.fetch(query)}


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


def _find_stored(connection: Connection, results: Sequence[Result], devices: Sequence[str]) -> set[tuple[Any, ...]]:
    """Return the keys (run, round, kind, device) of results that the record has already."""
    columns = (RESULTS.c.run, RESULTS.c.round, RESULTS.c.kind, RESULTS.c.device)
    query = select(*columns).where(
        RESULTS.c.run.in_({result.run for result in results}),
        RESULTS.c.round.in_({result.round for result in results}),
        RESULTS.c.device.in_(devices),
    )
    return {tuple(row) for row in connection.execute(query)}
