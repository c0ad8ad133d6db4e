"""`coordinator rm`: removes runs."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.removals import keep_mirrors_flag, print_removals
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator rm RUN"])
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Also remove a run that another one started from.")
@keep_mirrors_flag
@runs_flag
@json_flag
def rm(runs: tuple[str, ...], force: bool, keep_mirrors: bool, folder: Path, as_json: bool) -> None:
    """Remove runs: their rows of the record, their folders and their mirrors."""

    with open_runs(folder, writes=True) as source:
        removed = source.remove(list(dict.fromkeys(runs)), force=force, keep_mirrors=keep_mirrors)
    print_removals(removed, as_json, "removed")
