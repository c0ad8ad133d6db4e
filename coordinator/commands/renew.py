"""`coordinator renew`: renews the certificates of the broker and the coordinator."""

import json
from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from coordinator.security.clock import format_iso
from coordinator.security.folder import Deployment
from coordinator.security.own_certificates import read_end_s
from coordinator.security.service import is_served
from fedvit.command_line import Command, json_flag


@click.command(cls=Command, examples=["coordinator renew"])
@deployment_flag
@json_flag
def renew(folder: Path, as_json: bool) -> None:
    """Renew the certificates of the broker and the coordinator, which a service does by itself once a year.

    A broker that the service has started reads them at once.
    """

    deployment = Deployment.open(folder)
    ends = {name: read_end_s(deployment.folder / name) for name in deployment.settle(renew=True)}
    if as_json:
        click.echo(
            json.dumps({"renewed": [{"file": name, "expires": format_iso(end_s)} for name, end_s in ends.items()]})
        )
        return
    for name, end_s in ends.items():
        click.echo(f"{name} is valid until {format_iso(end_s)}")
    if not is_served(deployment):
        click.echo("no coordinator serves this deployment now; let an external mosquitto reload", err=True)
