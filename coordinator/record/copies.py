"""Copies of the database beside it, one set for all runs of a folder: which one is intact, which files are no longer
needed, and how a copy is put back when the database is damaged. `coordinator.record.backups` makes them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from sqlalchemy import create_engine, select, text
from sqlalchemy.exc import SQLAlchemyError

from coordinator.record.rows import read_rows, seal_of
from coordinator.record.tables import ENDED, SEAL, TABLES
from fedvit.errors import Damaged
from fedvit.files import WRITING, hold_lock, make_folder
from fedvit.hints import command

COPIES = "record.copies"
"""In a folder of runs: copies of the database. No run can have this name."""
NOTES = "notes"
"""In a run's folder: notes of what the run wrote to the record since the copies."""
KEPT = 2
"""Copies that are kept: the newest, and one more in case the newest is damaged."""
_LOCK = "lock"


class CopiedRun(NamedTuple):
    """A run as a copy has it."""

    status: str
    closed: int  # its newest closed round; 0: none


def number_in(file: Path) -> int:
    """Return the number in the name of a copy or of a file of notes."""
    return int(file.stem.partition("-")[2])


def copies_in(folder: Path) -> list[Path]:
    """Return the copies of a folder of runs, the oldest first."""
    return sorted((folder / COPIES).glob("copy-*.db"), key=number_in)


def notes_in(folder: Path) -> list[Path]:
    """Return the files of notes in a run's folder, the oldest first."""
    return sorted((folder / NOTES).glob("since-*.notes"), key=number_in)


@contextmanager
def lock_copies(folder: Path) -> Iterator[None]:
    """Let no other thread or process make or remove copies within the block. Raises OSError, StorageFailed."""
    make_folder(folder / COPIES)
    with hold_lock(folder / COPIES / _LOCK):
        yield


def read_runs(copy: Path) -> dict[str, CopiedRun]:
    """Return the runs of a copy, the newest first; none if it cannot be read."""
    closed = "SELECT max(round) FROM rounds WHERE run = runs.id AND closed_at IS NOT NULL"
    try:
        with closing(_connect(copy)) as connection:
            found = connection.execute(f"SELECT id, status, ({closed}) FROM runs ORDER BY created_at DESC, id DESC")
            return {run: CopiedRun(status, number or 0) for run, status, number in found}
    except sqlite3.Error:
        return {}


def find_unneeded(folder: Path) -> dict[Path, str]:
    """Return files that the kept copies of a folder of runs replace, each with the reason.

    To be called under `lock_copies`.
    """
    copies = copies_in(folder)
    unneeded = dict.fromkeys((folder / COPIES).glob(f"{WRITING}*"), "it was being written when a process ended")
    unneeded |= dict.fromkeys(copies[:-KEPT], f"the newest {KEPT} copies of the record are kept")
    kept = [read_runs(copy) for copy in copies[-KEPT:]]
    for run in set.intersection(*map(set, kept)) if kept else ():
        copied = [runs[run] for runs in kept]
        closed, ended = min(entry.closed for entry in copied), all(entry.status in ENDED for entry in copied)
        files = notes_in(folder / run)
        for file, following in zip_longest(files, files[1:]):
            # a file ends where the following one begins; the last one grows, unless the run has ended
            if ended if following is None else number_in(following) <= closed:
                unneeded[file] = "every kept copy of the record has its content"
    return unneeded


def is_whole(file: Path) -> bool:
    """Return whether a copy of the database, which no process writes, is intact."""
    engine = create_engine("sqlite://", creator=lambda: _connect(file))
    try:
        with engine.connect() as connection:
            if connection.execute(text("PRAGMA integrity_check(1)")).scalar() != "ok":
                return False
            for table in TABLES.sorted_tables:
                if SEAL not in table.columns:
                    continue
                if not all(row[SEAL] in (None, seal_of(table, row)) for row in read_rows(connection, select(table))):
                    return False
            return True
    except (SQLAlchemyError, ValueError):
        return False
    finally:
        engine.dispose()


def _connect(copy: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(copy))}?mode=ro&immutable=1", uri=True)


def newest_copy(database: Path, run: str | None = None) -> Path | None:
    """Return the newest intact copy of a database, or the newest that has a run; None if there is none."""
    copies = reversed(copies_in(database.parent))
    return next((file for file in copies if (run is None or run in read_runs(file)) and is_whole(file)), None)


def has_lost(database: Path, run: str | None = None) -> bool:
    """Return whether an intact copy has a run, or any, that the database lacks although its folder exists: `rm` removes
    the folder, too."""
    copy = newest_copy(database, run)
    runs = read_runs(copy) if copy else {}
    return any((database.parent / name).is_dir() for name in runs if run in (None, name))


def make_file_damaged_error(database: Path, why: str, run: str | None = None) -> Damaged:
    """Make the error of a damaged database: it names the newest intact copy and the commands that restore it."""
    damaged, folder = f"{database} is damaged: {why}", database.parent
    copy = newest_copy(database, run)
    if copy is None:
        return Damaged(
            "FV1621",
            f"{damaged}. There is no good copy of it in {folder / COPIES}: restore your own backup, or "
            f"move it away and start over (tensors of finished runs are in {folder}/RUN/model.safetensors)",
        )
    runs = read_runs(copy)
    run = run or next((name for name, copied in runs.items() if copied.status not in (*ENDED, "queued")), None)
    made = datetime.fromtimestamp(copy.stat().st_mtime, UTC).isoformat(" ", "seconds")
    resume = command("coordinator", "start", "--resume", run, runs=folder)
    following = resume if run else command("coordinator", "runs", runs=folder)
    return Damaged(
        "FV1621",
        f"{damaged}. The newest good copy is {copy}, made at {made}. While no coordinator serves this folder, put it "
        f"back: mv {database} {database}.damaged; rm -f {database}-wal {database}-shm; cp {copy} {database}; then: "
        f"{following}",
    )
