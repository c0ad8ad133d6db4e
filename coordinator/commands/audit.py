"""`coordinator audit`: who changed what, when, and from where."""

from pathlib import Path

import click
import msgspec

from coordinator.operations.opening import open_audit
from fedvit.command_line import Command, json_flag, print_json
from fedvit.quantities import format_count
from profiles.report.console import Console
from profiles.report.tables import Sheet, columns

PATH = click.Path(path_type=Path)


@click.command(
    cls=Command,
    examples=["coordinator audit --last 20", "coordinator audit --check --deployment deployment"],
)
@click.option("--runs", type=PATH, default=Path("runs"), help="Folder of all runs, whose audit is shown.")
@click.option(
    "--deployment",
    type=PATH,
    envvar="FEDVIT_DEPLOYMENT",
    help="Instead the audit of a deployment: its devices. With --server any name stands for the server's deployment.",
)
@click.option("--last", type=click.IntRange(min=1), help="Show only the newest so many entries.")
@click.option("--check", is_flag=True, help="Verify the chain of digests, and print the newest digest.")
@click.option(
    "--expect",
    metavar="DIGEST",
    help="With --check: a digest that was printed before, whose entry must still be there.",
)
@json_flag
def audit(
    runs: Path, deployment: Path | None, last: int | None, check: bool, expect: str | None, as_json: bool
) -> None:
    """Show who changed runs or devices, when, and from where; the newest last.

    Each entry's digest covers the entry before it. A person who can write the database can compute all digests anew:
    keep the newest digest elsewhere, and give it to --expect.
    """
    source = open_audit(runs, deployment)
    if check:
        verdict = source.check(expect)
        if as_json:
            click.echo(msgspec.json.encode(verdict).decode())
        else:
            click.echo(f"{format_count(verdict.entries, 'entry')} intact; newest digest: {verdict.digest or 'none'}")
        return
    entries = source.read(last)
    if as_json:
        print_json(entries)
        return
    console = Console()
    shown = {"at": "at, UTC", "who": "who", "origin": "from", "act": "act", "subject": "of", "details": "details"}
    console.print(Sheet(entries, columns(shown)).draw(None, console.width) if entries else "no entry")
