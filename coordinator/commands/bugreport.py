"""`coordinator bugreport`: packs what is needed to find a fault of a run or of the service."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.operations.bug_report import collect_report
from fedvit.bug_report import print_and_write
from fedvit.command_line import Command


@click.command(
    cls=Command,
    examples=["coordinator bugreport --runs runs", "coordinator bugreport RUN --runs runs --out report.zip"],
)
@click.argument("run", required=False)
@runs_flag
@click.option("--out", type=click.Path(path_type=Path), default=Path("fedvit-report.zip"), help="File to write.")
def bugreport(run: str | None, folder: Path, out: Path) -> None:
    """Write a ZIP file for the report of a fault: versions, configuration, rounds, problems and logs.

    The rounds are those of RUN, by default of the newest. It has no tensors, names of classes, keys, passwords, tokens
    or addresses. Look into it before you send it.
    """
    print_and_write(collect_report(folder, run), out)
