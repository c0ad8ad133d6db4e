"""`coordinator label`: labels of a device that the coordinator's operator sets."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
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

    changes = bool(labels or removed)
    with open_runs(folder, writes=changes) as runs:
        found = runs.set_labels(device, labels, removed) if changes else runs.read_labels(device)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    elif found.labels:
        click.echo(f"{device}: {', '.join(f'{name}={value}' for name, value in found.labels.items())}")
    else:
        click.echo(f"{device}: no label was set here")
