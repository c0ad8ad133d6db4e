"""`coordinator label`: labels of devices that the coordinator's operator sets."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
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
    labels = tuple(word for word in words if "=" in word)
    if not devices:
        raise click.UsageError(f"{words[0]!r} is a label: name a device before it")
    changes = bool(labels or removed)
    with open_runs(folder, writes=changes) as runs:
        found = runs.label_all(devices, labels, removed) if changes else list(map(runs.read_labels, devices))
    if as_json:
        click.echo(msgspec.json.encode(found if len(found) > 1 else found[0]).decode())
        return
    for entry in found:
        shown = ", ".join(f"{name}={value}" for name, value in entry.labels.items())
        click.echo(f"{entry.device}: {shown or 'no label was set here'}")
