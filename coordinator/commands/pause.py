"""`coordinator pause` and `unpause`: a paused run opens no new round."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files

if TYPE_CHECKING:
    from coordinator.record.record import Record


@click.command(cls=Command, examples=["coordinator pause RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def pause(run: str, folder: Path, as_json: bool) -> None:
    """Pause RUN: it finishes its open round, and opens no new one until `coordinator unpause`, also after a restart."""
    from coordinator.rounds.service.pausing import pause as pause_run

    _change(run, folder, as_json, pause_run)


@click.command(cls=Command, examples=["coordinator unpause RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def unpause(run: str, folder: Path, as_json: bool) -> None:
    """Let the paused RUN open rounds again. A run whose process has ended needs `coordinator start --resume`, too."""
    from coordinator.rounds.service.pausing import unpause as unpause_run

    _change(run, folder, as_json, unpause_run)


def _change(run: str, folder: Path, as_json: bool, change: "Callable[[Record, str], str]") -> None:
    store = existing_store(folder, writes=True)
    try:
        done = change(store, run)
        paused_at = store.runs.read(run).paused_at
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.encode({"run": run, "paused_at": paused_at}).decode())
    else:
        click.echo(f"run {run}: {done}")
