"""`coordinator rotate-authority`: replaces the authority of a deployment."""

import json
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import deployment_flag
from coordinator.security.clock import format_iso
from coordinator.security.folder import Deployment
from coordinator.security.rotating import RotationView, begin_rotation, finish_rotation, read_rotation
from coordinator.security.service import is_served
from fedvit.command_line import Command, amount, json_flag
from fedvit.errors import ConfigError
from fedvit.quantities import format_seconds, parse_seconds

LEAST_S = 3600.0
"""Interval at which devices ask for certificates."""


@click.command(
    "rotate-authority",
    cls=Command,
    examples=["coordinator rotate-authority", "coordinator rotate-authority --status --json"],
)
@deployment_flag
@click.option(
    "--within",
    default="90d",
    callback=amount(parse_seconds),
    metavar="TIME",
    help="Longest time for which both authorities are trusted; devices that are away for longer are left behind.",
)
@click.option("--status", is_flag=True, help="Only show which devices have moved.")
@click.option("--finish", is_flag=True, help="Trust the new authority only, from now on.")
@json_flag
def rotate_authority(folder: Path, within: float, status: bool, finish: bool, as_json: bool) -> None:
    """Replace the authority of a deployment while it is served.

    Broker, coordinator and devices trust both until all devices have moved to the new one, which they do when they
    connect; then the rotation ends by itself.
    """

    if status and finish:
        raise click.UsageError("--status and --finish exclude each other")
    if within < LEAST_S:
        raise ConfigError(
            "FV1324", f"--within {format_seconds(within)}: a device needs up to an hour to move; give it at least 1h"
        )
    deployment = Deployment.open(folder)
    if finish:
        finish_rotation(deployment)
    elif not status:
        begin_rotation(deployment, within)
    view = read_rotation(deployment)
    if as_json:
        click.echo(json.dumps(_as_json(view), indent=2))
        return
    for line in view.describe(deployment):
        click.echo(line)
    if not status and not is_served(deployment):
        click.echo("no coordinator serves this deployment now; an external mosquitto must be restarted", err=True)


def _as_json(view: RotationView) -> dict[str, Any]:
    return {
        "authority": view.authority,
        "next_authority": view.next,
        "begun": format_iso(view.begun_at),
        "until": format_iso(view.until),
        "moved": view.updated,
        "former": view.former,
        "awaited": view.awaited,
        "open_tokens": view.tokens,
    }
