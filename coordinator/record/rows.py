"""Rows of the record's tables as records, each sealed: its digest in a column shows whether the row was damaged."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from sqlalchemy import JSON, ColumnElement, Select, Table, Text, bindparam, cast, delete, func, select, update
from sqlalchemy.engine import Connection

from coordinator.record.tables import SEAL, to_json
from fedvit.blobs import digest_of

_R = TypeVar("_R", bound=Struct)

_SORTING_ENCODER = msgspec.json.Encoder(order="sorted")


class BrokenSeal(ValueError):
    """A row does not match its seal: the file is damaged, or something else wrote it."""


def read_records(
    connection: Connection, kind: type[_R], table: Table, query: Select[Any] | None = None
) -> Iterator[_R]:
    """Yield the rows of a query, or of a whole table, as records. Raises BrokenSeal."""
    for row in read_rows(connection, select(table) if query is None else query):
        if row.get(SEAL) not in (None, seal_of(table, row)):  # who edits a row by hand clears its seal
            raise BrokenSeal(f"the seal of a row of table {table.name!r} is broken")
        yield record_of(kind, row)


def read_rows(connection: Connection, query: Select[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a query by column."""
    found = connection.execute(query)
    names = list(found.keys())
    for row in found:
        yield dict(zip(names, row, strict=True))


def record_of(kind: type[_R], row: dict[str, Any]) -> _R:
    """Convert a row to a record; empty or missing columns get the field's default."""
    values = {
        name: value for name, has_default in _fields(kind) if (value := row.get(name)) is not None or not has_default
    }
    return msgspec.convert(values, kind)


@cache
def _fields(kind: type[Struct]) -> list[tuple[str, bool]]:
    """Return the fields of a record class, and whether they have a default."""
    return [(field.name, not field.required) for field in msgspec.structs.fields(kind)]


def drop_empty_fields(values: Struct) -> dict[str, Any]:
    """Return the fields that are not None, which is the default of all that may be."""
    return {name: value for name, value in msgspec.structs.asdict(values).items() if value is not None}


def insert(connection: Connection, table: Table, records: Iterable[Struct], **more: Any) -> None:
    """Insert rows; `more` are further columns."""
    rows = [{**msgspec.to_builtins(record), **more} for record in records]
    write(connection, table, rows)


def replace(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows, replacing those with the same keys."""
    if connection.dialect.name != "sqlite":
        keys = [column.name for column in table.primary_key]
        this = [table.c[name] == bindparam(f"this_{name}") for name in keys]
        connection.execute(delete(table).where(*this), [{f"this_{name}": row[name] for name in keys} for row in rows])
    write(connection, table, rows, "REPLACE")


def write(connection: Connection, table: Table, rows: list[dict[str, Any]], on_conflict: str = "ABORT") -> None:
    """Insert sealed rows; `on_conflict` says what SQLite does with an existing row."""
    if connection.dialect.name != "sqlite":
        connection.execute(table.insert(), _add_seals(table, [without_zero_bytes(row) for row in rows]))
        return
    rows = _add_seals(table, rows)
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


def without_zero_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """PostgreSQL refuses texts with a byte of 0, which a device's message may have."""
    return {name: value.replace("\0", "\ufffd") if isinstance(value, str) else value for name, value in row.items()}


def without_infinite(figures: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return JSON as text with null in place of numbers that are not finite, which databases refuse in JSON."""
    held: ColumnElement[Any] = cast(figures, Text)
    for number in ("NaN", "-Infinity", "Infinity"):
        held = func.replace(held, number, "null")
    return held


def _add_seals(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {SEAL: seal_of(table, row)} for row in rows] if SEAL in table.columns else rows


def seal(connection: Connection, table: Table, *where: ColumnElement[bool]) -> None:
    """Update the seals of rows that were changed."""
    for row in list(read_rows(connection, select(table).where(*where))):
        this = [column == row[column.name] for column in table.primary_key]
        connection.execute(update(table).where(*this).values(seal=seal_of(table, row)))


def seal_of(table: Table, row: Mapping[str, Any]) -> str:
    """Return the digest of a row's non-empty columns, so that a new column does not change existing seals."""
    held = {name: value for name in _columns(table) if (value := row.get(name)) is not None}
    return digest_of(_SORTING_ENCODER.encode(held))


@cache
def _columns(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.name != SEAL]
