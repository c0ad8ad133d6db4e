"""`edge-client`: one device of a fleet. Nothing here or below imports a deep-learning framework."""

from importlib.metadata import version
from typing import Any

import click

from edge_client.commands.doctor import doctor
from edge_client.commands.export import export
from edge_client.commands.gc import gc
from edge_client.commands.join import join_command
from edge_client.commands.label import label
from edge_client.commands.options import OPTIONS
from edge_client.commands.predict import predict
from edge_client.commands.profile import profile_command
from edge_client.commands.rm import rm
from edge_client.commands.serve import serve
from edge_client.commands.status import status
from fedvit import command_line


@click.group(
    cls=command_line.Group,
    params=list(OPTIONS),
    invoke_without_command=True,
    context_settings={"show_default": True},
    examples=[
        "edge-client --broker SERVER --data ~/images",
        "edge-client --data ~/images --memory-budget 512MB --quiet-hours 22:00-06:30",
        "edge-client doctor --data ~/images",
    ],
)
@click.version_option(version("fedvit"))
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Train on this device's own images, which never leave it, as the coordinator asks."""
    if context.invoked_subcommand is None:
        serve(**options)


for command in (doctor, export, gc, join_command, label, predict, profile_command, rm, status):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "edge-client")
