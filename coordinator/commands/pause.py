"""`coordinator pause`: a paused run opens no new round."""

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_existing_record
from coordinator.record.record import Record
from coordinator.rounds.service.pausing import pause as pause_run
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator pause RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def pause(run: str, folder: Path, as_json: bool) -> None:
    """Pause RUN: it finishes its open round, and opens no new one until `coordinator unpause`, also after a restart."""
    change_pause(run, folder, as_json, pause_run)


def change_pause(run: str, folder: Path, as_json: bool, change: Callable[[Record, str], str]) -> None:
    """Pause or unpause a run, and print since when it is paused."""
    store = open_existing_record(folder, writes=True)
    try:
        done = change(store, run)
        paused_at = store.runs.read(run).paused_at
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.encode({"run": run, "paused_at": paused_at}).decode())
    else:
        click.echo(f"run {run}: {done}")
