"""`coordinator retry`: another attempt of a failed run."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.run_change import print_change
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator retry RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def retry(run: str, folder: Path, as_json: bool) -> None:
    """Let a service serve the failed RUN again: from its newest round, or from the queue if it has none."""
    with open_runs(folder, writes=True) as runs:
        print_change(runs.retry(run), "status", as_json=as_json)
