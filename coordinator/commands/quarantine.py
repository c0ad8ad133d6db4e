"""`coordinator quarantine`: lists and releases devices with strikes or in quarantine."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
from coordinator.run_view import Standing
from fedvit.command_line import Command, json_flag, print_json
from profiles.report.console import Console
from profiles.report.tables import Column, Sheet, columns


@click.command(cls=Command, examples=["coordinator quarantine RUN", "coordinator quarantine RUN --release pi-3"])
@click.argument("run")
@click.option("--release", "released", multiple=True, metavar="ID", help="End this device's quarantine. Repeatable.")
@runs_flag
@json_flag
def quarantine(run: str, released: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """List devices with strikes or in quarantine; or release some, also during the run.

    A released device that had been sent away must be restarted.
    """

    with open_runs(folder, writes=bool(released)) as runs:
        standings = runs.read_standings(run)
        for device in released:
            standings = runs.read_standings(run, [device])
            click.echo(f"{device}: released, its strikes are reset", err=True)
    if as_json:
        print_json(standings)
        return
    shown = [*columns({"device": "device", "strikes": "strikes"}), Column("quarantine", "quarantine", _describe)]
    console = Console()
    sheet = Sheet(standings, shown)
    console.print(sheet.draw("devices with strikes", console.width) if standings else "no device has a strike")


def _describe(standing: Standing) -> str:
    until = "" if standing.until_round is None else f"until round {standing.until_round}: "
    return f"{until}{standing.quarantine}" if standing.quarantine else "-"
