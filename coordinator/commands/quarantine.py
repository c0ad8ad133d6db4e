"""`coordinator quarantine`: lists and releases devices with strikes or in quarantine."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import Struct

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError

if TYPE_CHECKING:
    from coordinator.record.store import Store


class Standing(Struct, frozen=True, kw_only=True):
    """Strikes and quarantine of a device in a run."""

    device: str
    strikes: int  # since its last quarantine
    quarantine: str | None  # the reason, while it lasts
    until_round: int | None  # of a quarantine that ends by itself


def standings(store: "Store", run: str) -> list[Standing]:
    """The standing of every device that ever had a strike. Raises ConfigError if there is no such run."""
    store.run(run)
    strikes = store.strikes(run)
    now = store.last_round(run) or 1
    held = {record.device: record for record in store.quarantines(run) if record.holds(now)}
    return [
        Standing(
            device=device,
            strikes=sum(entry.device == device and not entry.spent for entry in strikes),
            quarantine=held[device].reason if device in held else None,
            until_round=held[device].until_round if device in held else None,
        )
        for device in sorted({entry.device for entry in strikes})
    ]


@click.command(cls=Command, examples=["coordinator quarantine RUN", "coordinator quarantine RUN --release pi-3"])
@click.argument("run")
@click.option("--release", "released", multiple=True, metavar="ID", help="End this device's quarantine. Repeatable.")
@runs_flag
@json_flag
def quarantine(run: str, released: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """List devices with strikes or in quarantine; or release some, also during the run.

    A released device that had been sent away must be restarted.
    """
    from rich.console import Console
    from rich.text import Text

    from profiles.report.terminal import column
    from profiles.report.terminal import table as new_table

    store = existing_store(folder, writes=bool(released))
    try:
        store.run(run)
        for device in released:
            if not store.release(run, device):
                raise ConfigError(f"device {device!r} has neither strikes nor a quarantine in run {run!r}")
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
