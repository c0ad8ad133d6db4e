"""`coordinator unpause`: a paused run opens rounds again."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.run_change import print_change
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator unpause RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def unpause(run: str, folder: Path, as_json: bool) -> None:
    """Let the paused RUN open rounds again. A run whose process has ended needs `coordinator start --resume`, too."""
    with open_runs(folder, writes=True) as runs:
        print_change(runs.unpause(run), "paused_at", as_json=as_json)
