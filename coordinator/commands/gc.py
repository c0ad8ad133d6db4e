"""`coordinator gc`: frees disk space, by the policy of runs."""

from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import runs_flag
from coordinator.commands.removals import keep_mirrors_flag, print_removals
from coordinator.operations.opening import open_runs
from coordinator.record.retention import RetentionPolicy
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator gc --keep-runs 10 --dry-run"])
@click.option(
    "--keep-runs", type=click.IntRange(min=0), help="Number of finished runs to keep; by default as configured."
)
@click.option(
    "--keep-rounds",
    type=click.IntRange(min=1),
    help="Number of rounds whose details are kept; by default as configured.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@keep_mirrors_flag
@runs_flag
@json_flag
def gc(folder: Path, as_json: bool, **settings: Any) -> None:
    """Remove runs and details beyond the policy, and unreferenced files. Runs that are being served are not changed."""
    policy = RetentionPolicy(**settings)
    with open_runs(folder, writes=True) as runs:
        removed = runs.clean_up(policy, report=lambda line: click.echo(line, err=True))
    print_removals(removed, as_json, "would remove" if policy.dry_run else "removed")
