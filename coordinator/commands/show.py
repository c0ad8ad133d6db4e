"""`coordinator show`: shows one run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from coordinator.commands.flags import existing_store, newest_run, runs_flag
from fedvit.command_line import Command, json_flag

if TYPE_CHECKING:
    pass


@click.command(cls=Command, examples=["coordinator show", "coordinator show RUN"])
@click.argument("run", required=False)
@runs_flag
@json_flag
def show(run: str | None, folder: Path, as_json: bool) -> None:
    """Print RUN, by default the newest: accuracy by round, devices, refusals."""
    from coordinator.commands.run_tables import MOST_ROUNDS
    from coordinator.record.summary import summarise

    store = existing_store(folder)
    try:
        summary = summarise(store, run or newest_run(store, folder), accuracy_of=None if as_json else MOST_ROUNDS)
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary)).decode())
        return
    print_summary(summary)


def print_summary(summary: Any) -> None:
    """The tables of one run on standard output."""
    from coordinator.commands.run_tables import report
    from profiles.report.console import Console

    console = Console()
    console.print(report(summary, console.width))
