"""Totals of rounds and devices, written when a round is closed or evaluated."""

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, select, update
from sqlalchemy.engine import Connection

from coordinator.record import totals
from coordinator.record.rows import drop_empty_fields, read_records, read_rows, record_of, replace, seal
from coordinator.record.tables import DEVICES, RESULTS, ROUNDS, SUM, TASKS, DeviceRecord, ResultRecord, RoundTotals
from fedvit.resources import BudgetKind
from fedvit.wire.messages import TaskKind


def sum_up_training(
    connection: Connection,
    run: str,
    number: int,
    asked: Sequence[str] | None = None,
    results: Sequence[ResultRecord] | None = None,
) -> None:
    """Compute the totals of a closed round, and update those of its devices."""
    this = this_round(run, number)
    row = connection.execute(select(ROUNDS.c.cohort, ROUNDS.c.figures, ROUNDS.c.totals).where(this)).one()
    if results is None:
        results = read_used_results(connection, run, number, "train")
    if row.totals is None:  # otherwise its devices were counted already
        asked = find_asked(connection, run, number) if asked is None else asked
        add_to_devices(connection, run, number, results, asked)
    cohort = int(
        (row.figures or {}).get("cohort", len(row.cohort))
    )  # in mode buffered including devices of earlier rounds
    made = totals.add_training(RoundTotals(cohort=cohort), results)
    connection.execute(update(ROUNDS).where(this).values(totals=msgspec.to_builtins(made)))
    seal(connection, ROUNDS, this)


def sum_up_evaluation(
    connection: Connection, run: str, number: int, results: Sequence[ResultRecord] | None = None
) -> None:
    """Add the totals of an evaluation to those of its round, and to those of its devices."""
    this = this_round(run, number)
    row = connection.execute(select(ROUNDS.c.totals, ROUNDS.c.accuracy).where(this)).one()
    if row.totals is not None and row.accuracy is None:  # otherwise it is open, or was summed up already
        if results is None:
            results = read_used_results(connection, run, number, "evaluate")
        add_to_devices(connection, run, number, results, ())
        made, accuracy = totals.add_evaluation(msgspec.convert(row.totals, RoundTotals), results)
        connection.execute(update(ROUNDS).where(this).values(totals=msgspec.to_builtins(made), accuracy=accuracy))
    seal(connection, ROUNDS, this)


def read_used_results(connection: Connection, run: str, number: int, kind: TaskKind) -> list[ResultRecord]:
    """Return results that the server step, or the evaluation, of a round uses, including late ones."""
    query = select(RESULTS).where(RESULTS.c.run == run, RESULTS.c.used_in == number, RESULTS.c.kind == kind)
    found = read_records(connection, ResultRecord, RESULTS, query)
    return sorted(found, key=lambda result: (result.round, result.device))  # sorting in SQLite would scan all results


def find_asked(connection: Connection, run: str, number: int) -> list[str]:
    """Return devices with a training task in a round."""
    query = select(TASKS.c.device).where(TASKS.c.run == run, TASKS.c.round == number)
    return list(connection.execute(query).scalars())


def add_to_devices(
    connection: Connection, run: str, number: int, results: Sequence[ResultRecord], asked: Iterable[str]
) -> None:
    """Add a round's results and asked devices to the totals of its devices."""
    asked, results = set(asked), [result for result in results if result.device != SUM]
    known = read_devices(connection, run, asked | {result.device for result in results})
    for name in asked:
        last, times = max(known[name].last_asked, number), known[name].times_asked + 1
        known[name] = msgspec.structs.replace(known[name], last_asked=last, times_asked=times)
    for result in results:
        before = known[result.device]
        known[result.device] = msgspec.structs.replace(before, totals=totals.with_result(before.totals, result))
    if known:
        rows = [
            {**msgspec.structs.asdict(record), "totals": drop_empty_fields(record.totals)} for record in known.values()
        ]
        replace(connection, DEVICES, rows)


def add_broken(connection: Connection, run: str, device: str, kind: BudgetKind) -> None:
    """Count a budget that stopped a device."""
    known = read_devices(connection, run, [device])[device]
    changed = msgspec.structs.replace(known, totals=totals.with_broken(known.totals, (kind,)))
    replace(connection, DEVICES, [msgspec.to_builtins(changed)])


def read_devices(connection: Connection, run: str, names: Iterable[str]) -> dict[str, DeviceRecord]:
    """Return the records of these devices; new ones for unknown devices."""
    known = {name: DeviceRecord(run, name) for name in names}
    for row in read_rows(connection, select(DEVICES).where(DEVICES.c.run == run, DEVICES.c.device.in_(list(known)))):
        known[row["device"]] = record_of(DeviceRecord, row)
    return known


def this_round(run: str, number: int) -> ColumnElement[bool]:
    return and_(ROUNDS.c.run == run, ROUNDS.c.round == number)
