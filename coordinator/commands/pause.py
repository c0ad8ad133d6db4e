"""`coordinator pause`: a paused run opens no new round."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.documents import ChangedRun
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator pause RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def pause(run: str, folder: Path, as_json: bool) -> None:
    """Pause RUN: it finishes its open round, and opens no new one until `coordinator unpause`, also after a restart."""
    with open_runs(folder, writes=True) as runs:
        print_pause(runs.pause(run), as_json)


def print_pause(changed: ChangedRun, as_json: bool) -> None:
    """Print since when a run is paused."""
    if as_json:
        click.echo(msgspec.json.encode({"run": changed.run, "paused_at": changed.paused_at}).decode())
    else:
        click.echo(f"run {changed.run}: {changed.done}")
