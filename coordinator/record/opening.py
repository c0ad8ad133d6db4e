"""Opening the record of a folder of runs, as commands need it."""

import os
from contextlib import ExitStack
from pathlib import Path

from coordinator.record.record import Record, open_copy, open_record
from fedvit.errors import ConfigError
from fedvit.files import make_private


def has_record(folder: Path) -> bool:
    """Return whether a folder of runs has a record: SQLite's database, or the address of another one."""
    return any((folder / name).is_file() for name in ("fedvit.db", "record.url"))


def open_existing_record(folder: Path, *, writes: bool = False) -> Record:
    """Open the record of all runs in a folder, without verifying the whole database.

    Reading needs no write permission. Raises ConfigError if there is no record.
    """
    _check_record(folder)
    if writes or os.access(folder, os.W_OK) or not (folder / "fedvit.db").is_file():
        return open_record(folder, check=False)
    return open_copy(folder)


def newest_run(store: Record, folder: Path) -> str:
    """Return the run that a command uses if none is named: the newest that has begun, else the newest in the queue.

    Raises ConfigError if there is none.
    """
    runs = store.runs.read_all()
    if not runs:
        raise ConfigError("FV1318", f"there is no run in {folder}")
    return next((record.id for record in runs if record.status != "queued"), runs[0].id)


def open_to_watch(folder: Path) -> Record:
    """Open the record of all runs in a folder for a process that never writes it.

    Raises ConfigError if there is none, or if another version of this software wrote it.
    """
    _check_record(folder)
    return open_record(folder, check=False, reads_only=True)


def _check_record(folder: Path) -> None:
    if not has_record(folder):
        raise ConfigError(
            "FV1601",
            f"no runs in {folder.resolve()}: there is neither fedvit.db nor record.url; use --runs for another folder",
        )


def open_private_record(folder: Path, stack: ExitStack) -> Record:
    """Open the record of all runs, and make their files private."""
    store = open_record(folder, check=False)  # verified while the run waits for devices
    stack.callback(store.close)
    make_private([*folder.glob("fedvit.db*"), *(folder / record.id for record in store.runs.read_all())])
    return store
