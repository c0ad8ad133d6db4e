"""`fleet bugreport`: packs what is needed to find a fault of a fleet on this machine."""

from pathlib import Path

import click

from coordinator.api import runs_flag
from coordinator.operations.bug_report import collect_report
from fedvit.bug_report import print_and_write
from fedvit.command_line import Command


@click.command(cls=Command, examples=["fleet bugreport --runs runs", "fleet bugreport RUN --runs demo/runs"])
@click.argument("run", required=False)
@runs_flag
@click.option("--out", type=click.Path(path_type=Path), default=Path("fedvit-fleet-report.zip"), help="File to write.")
def bugreport(run: str | None, folder: Path, out: Path) -> None:
    """Write a ZIP file for the report of a fault: versions, configuration, rounds, logs of coordinator and devices.

    The rounds are those of RUN, by default of the newest. It has no images, names of classes, keys, passwords, tokens
    or addresses. Look into it before you send it.
    """
    print_and_write(collect_report(folder, run), out)
