"""`coordinator runs`: lists all runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag

if TYPE_CHECKING:
    pass


@click.command(cls=Command, examples=["coordinator runs", "coordinator runs --runs /srv/fedvit/runs --json"])
@runs_flag
@json_flag
def runs(folder: Path, as_json: bool) -> None:
    """List all runs, newest first."""
    from coordinator.commands.run_tables import runs_table
    from coordinator.record.summary import overview
    from profiles.report.console import Console

    store = existing_store(folder)
    try:
        listed = overview(store, folder)
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(listed), indent=2))
        return
    console = Console()
    console.print(runs_table(listed, console.width))
