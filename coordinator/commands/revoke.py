"""`coordinator revoke`: revokes devices of a deployment."""

import json
from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from coordinator.operations.opening import open_devices
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator revoke pi-1", "coordinator revoke pi-1 pi-2 --json"])
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@deployment_flag
@json_flag
def revoke(names: tuple[str, ...], folder: Path, as_json: bool) -> None:
    """Revoke devices: their connections end at once; their certificates and unused tokens become invalid.

    If one of the names is unknown, no device is revoked; with --server, those before it are.
    """

    devices = list(dict.fromkeys(names))
    lines = open_devices(folder).revoke_all(devices).lines
    notes = lines[len(devices) :]
    if as_json:
        click.echo(json.dumps({"revoked": devices, "notes": notes}))
        return
    for done in lines[: len(devices)]:
        click.echo(done)
    for note in notes:
        click.echo(note, err=True)
