"""Copies of the database in the folders of runs: which one is intact, and how it is put back when the database is
damaged. `coordinator.record.backups` makes them."""

import sqlite3
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import create_engine, inspect, select, text
from sqlalchemy.exc import SQLAlchemyError

from coordinator.record.rows import read_rows, seal_of
from coordinator.record.tables import SEAL, TABLES
from fedvit.errors import Damaged

COPIES = "backups"
"""In a run's folder: copies of the database."""


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
                rows = read_rows(connection, select(*(column for column in table.columns if column.name in there)))
                if not all(row[SEAL] in (None, seal_of(table, row)) for row in rows):
                    return False
            return True
    except (SQLAlchemyError, ValueError):
        return False
    finally:
        engine.dispose()


def newest_copy(database: Path, run: str = "*") -> Path | None:
    """The newest intact copy of a damaged database, of any run or of one."""
    made = {file: file.stat().st_mtime_ns for file in database.parent.glob(f"{run}/{COPIES}/round-*.db")}
    return next((file for file in sorted(made, key=lambda file: made[file], reverse=True) if is_whole(file)), None)


def damaged_database(database: Path, why: str, of_run: str = "*") -> Damaged:
    """The error of a damaged database: names the newest intact copy and the commands that restore it."""
    damaged = f"{database} is damaged: {why}"
    copy = newest_copy(database, of_run)
    if copy is None:
        return Damaged(
            f"{damaged}. There is no good copy of it in {database.parent}/RUN/{COPIES}: restore your own backup, or "
            f"move it away and start over (tensors of finished runs are in {database.parent}/RUN/model.safetensors)"
        )
    run, number = copy.parent.parent.name, copy.stem.partition("-")[2]
    return Damaged(
        f"{damaged}. The newest good copy is {copy}, made after round {number} of run {run}. While no coordinator "
        f"serves this folder, put it back: mv {database} {database}.damaged; rm -f {database}-wal {database}-shm; "
        f"cp {copy} {database}; then: coordinator start --resume {run} --runs {database.parent}"
    )
