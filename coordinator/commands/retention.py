"""`coordinator gc` and `rm`: room on the disk."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from coordinator.commands.flags import existing_store

if TYPE_CHECKING:
    from coordinator.record.retention import Removal

_OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")


@click.command()
@click.option("--keep-runs", type=click.IntRange(min=0), help="Finished runs that stay; by default as configured.")
@click.option("--keep-rounds", type=click.IntRange(min=1), help="Rounds whose details stay; by default as configured.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_OUT
@_JSON
def gc(keep_runs: int | None, keep_rounds: int | None, dry_run: bool, out: Path, as_json: bool) -> None:
    """Remove what the policy does not keep, and files that nothing refers to. Runs that are being served stay."""
    from coordinator.record.retention import collect

    store = existing_store(out, writes=True)
    try:
        removed = list(collect(store, out, keep_runs=keep_runs, keep_rounds=keep_rounds, dry_run=dry_run))
        if any(entry.what in ("run", "details") for entry in removed) and not dry_run:
            store.compact()
    finally:
        store.close()
    _say(removed, as_json, "would remove" if dry_run else "removed")


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--force", is_flag=True, help="Also a run that another one started from.")
@_OUT
@_JSON
def rm(runs: tuple[str, ...], force: bool, out: Path, as_json: bool) -> None:
    """Remove runs: their rows of the record and their folders."""
    from coordinator.record.retention import remove_runs

    store = existing_store(out, writes=True)
    try:
        removed = remove_runs(store, out, list(dict.fromkeys(runs)), force=force)
    finally:
        store.close()
    _say(removed, as_json, "removed")


def _say(removed: "list[Removal]", as_json: bool, verb: str) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(removed)).decode())
        return
    for entry in removed:
        where = entry.path or f"record of run {entry.run}"
        click.echo(f"{verb} {entry.what} ({entry.bytes / 1e6:.1f} MB): {where}: {entry.why}")
    click.echo(f"{verb} {sum(entry.bytes for entry in removed) / 1e6:.1f} MB" if removed else "nothing to remove")
