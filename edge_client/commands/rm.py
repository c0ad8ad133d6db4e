"""`edge-client rm`: removes runs from the device."""

from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.retention import lines, lock_states, remove_runs
from edge_client.storage.state import existing_state, lock_state
from fedvit.command_line import Command, json_flag, print_json


@click.command(
    "rm",
    cls=Command,
    params=program_options("data", "state"),
    examples=["edge-client rm RUN --data ~/images"],
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Also remove runs that may be resumed.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@json_flag
@click.pass_context
def command(
    context: click.Context, /, *, runs: tuple[str, ...], force: bool, dry_run: bool, as_json: bool, **own: Any
) -> None:
    """Remove the vaults of RUNS, also of the newest. A run with an unacknowledged result is refused."""

    state = existing_state(read_settings(context, own))
    with lock_states(state, lock_state):
        report = remove_runs(state, list(dict.fromkeys(runs)), force=force, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        click.echo(lines(report))
