"""`coordinator label`: labels of a device that the coordinator's operator sets."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_existing_record
from coordinator.rounds.service.labelling import set_labels
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator label pi-3 site=berlin", "coordinator label pi-3 --remove site"])
@click.argument("device")
@click.argument("labels", nargs=-1, metavar="[NAME=VALUE]...")
@click.option(
    "--remove", "removed", multiple=True, metavar="NAME", help="Use the device's own label again. Repeatable."
)
@runs_flag
@json_flag
@private_files()
def label(device: str, labels: tuple[str, ...], removed: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """Set labels of DEVICE in all runs of the folder; without any, list those that were set.

    They replace labels of the same names that the device's owner gave. A service uses them within seconds, a run of
    `coordinator start` from the device's next connection on.
    """

    store = open_existing_record(folder, writes=bool(labels or removed))
    try:
        set_labels(store, device, labels, removed)
        found = store.devices.read_labels(device).get(device, {})
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.encode({"device": device, "labels": found}).decode())
    elif found:
        click.echo(f"{device}: {', '.join(f'{name}={value}' for name, value in found.items())}")
    else:
        click.echo(f"{device}: no label was set here")
