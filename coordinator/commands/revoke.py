"""`coordinator revoke`: revokes a device of a deployment."""

from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from coordinator.operations.opening import open_devices
from fedvit.command_line import Command


@click.command(cls=Command, examples=["coordinator revoke pi-1"])
@click.argument("name")
@deployment_flag
def revoke(name: str, folder: Path) -> None:
    """Revoke a device: its connection ends at once; its certificate and unused tokens become invalid."""

    done, *notes = open_devices(folder).revoke(name).lines
    click.echo(done)
    for note in notes:
        click.echo(note, err=True)
