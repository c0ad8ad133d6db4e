"""`coordinator runs`, `show` and `status`: what is there, what became of it, what it is waiting for."""

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.flags import existing_store
from fedvit.errors import ConfigError


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def runs(out: Path, as_json: bool) -> None:
    """List all runs, newest first."""
    from rich.console import Console

    from coordinator.commands.run_tables import runs_table
    from coordinator.record.summary import overview

    store = existing_store(out)
    try:
        listed = overview(store, out)
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(listed), indent=2))
        return
    console = Console()
    console.print(runs_table(listed, console.width))


@click.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(run: str, out: Path, as_json: bool) -> None:
    """Print one run: accuracy by round, devices, refusals."""
    from coordinator.commands.run_tables import MOST_ROUNDS
    from coordinator.record.summary import summarise

    store = existing_store(out)
    try:
        summary = summarise(store, run, accuracy_of=None if as_json else MOST_ROUNDS)
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary)).decode())
        return
    print_summary(summary)


@click.command()
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(run: str | None, out: Path, as_json: bool) -> None:
    """Say what RUN, by default the newest, is waiting for, since when and until when."""
    from coordinator.record.summary import run_head
    from coordinator.run.status import lines, read_status

    store = existing_store(out)
    runs = store.runs()
    if run is None and not runs:
        raise ConfigError(f"there is no run in {out}")
    record = store.run(run) if run else runs[0]
    found = read_status(out / record.id)
    if as_json:
        head = msgspec.structs.asdict(run_head(record))
        click.echo(json.dumps({**head, **msgspec.to_builtins(found), "stale": found.is_stale()}, indent=2))
        return
    click.echo("\n".join(lines(record.id, record.status, found)))


def print_summary(summary: Any) -> None:
    """The tables of one run on standard output."""
    from rich.console import Console

    from coordinator.commands.run_tables import report

    console = Console()
    console.print(report(summary, console.width))
