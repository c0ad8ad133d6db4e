"""`coordinator label`: labels of devices that the coordinator's operator sets."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import open_existing_record
from coordinator.rounds.service.labelling import set_labels
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(
    cls=Command, examples=["coordinator label pi-3 pi-4 site=berlin", "coordinator label pi-3 --remove site"]
)
@click.argument("words", nargs=-1, required=True, metavar="DEVICE... [NAME=VALUE]...")
@click.option(
    "--remove", "removed", multiple=True, metavar="NAME", help="Use the device's own label again. Repeatable."
)
@runs_flag
@json_flag
@private_files()
def label(words: tuple[str, ...], removed: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """Set labels of devices in all runs of the folder; without any, list those that were set.

    They replace labels of the same names that the device's owner gave. A service uses them within seconds, a run of
    `coordinator start` from the device's next connection on.
    """

    devices = list(dict.fromkeys(word for word in words if "=" not in word))
    labels = [word for word in words if "=" in word]
    if not devices:
        raise click.UsageError(f"{words[0]!r} is a label: name a device before it")
    store = open_existing_record(folder, writes=bool(labels or removed))
    try:
        set_labels(store, devices, labels, removed)
        found = {device: store.devices.read_labels(device).get(device, {}) for device in devices}
    finally:
        store.close()
    if as_json:
        documents = [{"device": device, "labels": known} for device, known in found.items()]
        click.echo(msgspec.json.encode(documents if len(documents) > 1 else documents[0]).decode())
        return
    for device, known in found.items():
        shown = ", ".join(f"{name}={value}" for name, value in known.items())
        click.echo(f"{device}: {shown or 'no label was set here'}")
