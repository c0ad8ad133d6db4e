"""`coordinator rm`: removes runs."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.removals import keep_mirrors_flag, print_removals
from coordinator.record.opening import open_existing_record
from coordinator.record.retention import remove_runs
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator rm RUN"])
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Also remove a run that another one started from.")
@keep_mirrors_flag
@runs_flag
@json_flag
def rm(runs: tuple[str, ...], force: bool, keep_mirrors: bool, folder: Path, as_json: bool) -> None:
    """Remove runs: their rows of the record, their folders and their mirrors."""

    store = open_existing_record(folder, writes=True)
    try:
        removed = remove_runs(store, folder, list(dict.fromkeys(runs)), force=force, keep_mirrors=keep_mirrors)
    finally:
        store.close()
    print_removals(removed, as_json, "removed")
