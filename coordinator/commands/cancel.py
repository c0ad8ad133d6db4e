"""`coordinator cancel`: ends a run, which cannot be resumed."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.run_change import print_change
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator cancel RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def cancel(run: str, folder: Path, as_json: bool) -> None:
    """Cancel RUN: at once if it is queued, within seconds if it is being served. It cannot be resumed."""
    with open_runs(folder, writes=True) as runs:
        print_change(runs.cancel(run), "status", as_json=as_json)
