"""`coordinator quarantine`: lists and releases devices with strikes or in quarantine."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator quarantine RUN", "coordinator quarantine RUN --release pi-3"])
@click.argument("run")
@click.option("--release", "released", multiple=True, metavar="ID", help="End this device's quarantine. Repeatable.")
@runs_flag
@json_flag
def quarantine(run: str, released: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """List devices with strikes or in quarantine; or release some, also during the run.

    A released device that had been sent away must be restarted.
    """
    from rich.text import Text

    from coordinator.record.standings import release, standings
    from profiles.report.console import Console
    from profiles.report.terminal import column
    from profiles.report.terminal import table as new_table

    store = existing_store(folder, writes=bool(released))
    try:
        store.runs.read(run)
        for device in released:
            release(store, run, device)
            click.echo(f"{device}: released, its strikes are reset", err=True)
        found = standings(store, run)
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    table = new_table("devices with strikes")
    for heading in ("device", "strikes"):
        column(table, heading, justify="left" if heading == "device" else "right")
    table.add_column("quarantine", overflow="fold")
    for entry in found:
        until = "" if entry.until_round is None else f"until round {entry.until_round}: "
        table.add_row(
            Text(entry.device), str(entry.strikes), Text(f"{until}{entry.quarantine}" if entry.quarantine else "-")
        )
    Console().print(table if found else Text("no device has a strike"))
