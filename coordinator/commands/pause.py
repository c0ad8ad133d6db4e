"""`coordinator pause`: a paused run opens no new round."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.run_change import print_change
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
        print_change(runs.pause(run), "paused_at", as_json=as_json)
