"""Output of the commands that remove something."""

import click

from coordinator.record.retention import Removal
from fedvit.command_line import print_json
from fedvit.terminal import escape_line

keep_mirrors_flag = click.option(
    "--keep-mirrors", is_flag=True, help="Do not use the object stores of runs with [blobs] mirror = true."
)


def print_removals(removed: "list[Removal]", as_json: bool, verb: str) -> None:
    if as_json:
        print_json(removed)
        return
    for entry in removed:
        where = entry.path or f"record of run {entry.run}"
        click.echo(escape_line(f"{verb} {entry.what} ({entry.bytes / 1e6:.1f} MB): {where}: {entry.why}"))
    click.echo(f"{verb} {sum(entry.bytes for entry in removed) / 1e6:.1f} MB" if removed else "nothing to remove")
