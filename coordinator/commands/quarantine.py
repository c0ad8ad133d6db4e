"""`coordinator quarantine`: lists and releases devices with strikes or in quarantine."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_existing_record
from coordinator.rounds.service.releasing import release
from coordinator.run_view import Standing, read_standings
from fedvit.command_line import Command, json_flag
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

    store = open_existing_record(folder, writes=bool(released))
    try:
        store.runs.read(run)
        for device in released:
            release(store, run, device)
            click.echo(f"{device}: released, its strikes are reset", err=True)
        standings = read_standings(store, run)
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(standings)).decode())
        return
    shown = [*columns({"device": "device", "strikes": "strikes"}), Column("quarantine", "quarantine", _describe)]
    console = Console()
    sheet = Sheet(standings, shown)
    console.print(sheet.draw("devices with strikes", console.width) if standings else "no device has a strike")


def _describe(standing: Standing) -> str:
    until = "" if standing.until_round is None else f"until round {standing.until_round}: "
    return f"{until}{standing.quarantine}" if standing.quarantine else "-"
