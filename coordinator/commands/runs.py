"""`coordinator runs`: lists all runs."""

import json
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
from coordinator.views.terminal import draw_runs
from fedvit.command_line import Command, json_flag
from profiles.report.console import Console


@click.command(cls=Command, examples=["coordinator runs", "coordinator runs --runs /srv/fedvit/runs --json"])
@runs_flag
@json_flag
def runs(folder: Path, as_json: bool) -> None:
    """List all runs, newest first."""

    with open_runs(folder) as source:
        listed = source.list_all()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(listed), indent=2))
        return
    console = Console()
    console.print(draw_runs(listed, console.width))
