"""Flags that several commands share."""

import json
import os
from pathlib import Path
from typing import Any

import click

from coordinator.record.record import (
    Record,
    open_copy,
    open_record,
)
from fedvit.errors import ConfigError

DEPLOYMENT = Path("deployment")
"""Default folder of a deployment."""

runs_flag = click.option(
    "--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs."
)
"""The folder of runs, for every command that reads or makes some."""
record_flag = click.option(
    "--record",
    "url",
    metavar="URL",
    envvar="FEDVIT_RECORD",
    default=None,
    help="PostgreSQL database for the record of these runs: postgresql://USER:PASSWORD@HOST:PORT/DATABASE; or set "
    "FEDVIT_RECORD. Needed once: its address is kept in the folder. By default SQLite in the folder.",
)
deployment_flag = click.option(
    "--deployment",
    "folder",
    type=click.Path(path_type=Path),
    default=DEPLOYMENT,
    envvar="FEDVIT_DEPLOYMENT",
    help="Folder that `coordinator init` made; or set FEDVIT_DEPLOYMENT.",
)


def key_value(pair: str) -> tuple[str, Any]:
    """The two halves of KEY=VALUE. Raises ConfigError for another format."""
    key, equals, value = pair.partition("=")
    if not equals:
        raise ConfigError("FV1003", f"option {pair!r} must be written KEY=VALUE")
    return key, literal(value)


def literal(text: str) -> Any:
    """Return a number or true/false if the text is one, otherwise the text. "nan" and "inf" are numbers."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return _number(text)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def has_record(folder: Path) -> bool:
    """Return whether a folder of runs has a record: SQLite's database, or the address of another one."""
    return any((folder / name).is_file() for name in ("fedvit.db", "record.url"))


def existing_store(folder: Path, *, writes: bool = False) -> Record:
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
    """Open the record of all runs in a folder for a process that never writes it. Raises ConfigError if there is none,
    or if another version of this software wrote it."""

    _check_record(folder)
    return open_record(folder, check=False, reads_only=True)


def _check_record(folder: Path) -> None:
    if not has_record(folder):
        raise ConfigError(
            "FV1601",
            f"no runs in {folder.resolve()}: there is neither fedvit.db nor record.url; use --runs for another folder",
        )
