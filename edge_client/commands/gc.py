"""`edge-client gc`: frees disk space."""

from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.retention import collect, lines, lock_states, remove_strays
from edge_client.storage.state import existing_state, lock_state, state_base, stray_states
from fedvit.command_line import Command, json_flag, print_json


@click.command(
    "gc",
    cls=Command,
    params=program_options("data", "state"),
    examples=["edge-client gc --data ~/images --keep-runs 3 --dry-run"],
)
@click.option(
    "--keep-runs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of newest runs whose vaults are kept; by default 1.",
)
@click.option(
    "--strays",
    is_flag=True,
    help="Remove the state folders of this user's devices that never took part in a run, instead.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@json_flag
@click.pass_context
def command(
    context: click.Context, /, *, keep_runs: int | None, strays: bool, dry_run: bool, as_json: bool, **own: Any
) -> None:
    """Remove the vaults of finished runs except the newest, blobs that no run needs, and incomplete files.

    Runs with an unacknowledged result and runs that may be resumed are kept.
    """

    settings = read_settings(context, {**own, "keep_runs": keep_runs})
    if strays:
        report = remove_strays(state_base(), stray_states(), dry_run=dry_run)
    else:
        state = existing_state(settings)
        with lock_states(state, lock_state):
            report = collect(state, keep_runs=settings.policy.train.keep_runs or 1, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        click.echo(lines(report))
