"""`coordinator revoke`: revokes a device of a deployment."""

import time
from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from fedvit.command_line import Command
from fedvit.errors import ConfigError, LinkDown

TICK_S = 0.1
APPLY_S = 10.0
MOST_NAMED = 20
"""Most devices that an error message lists."""


@click.command(cls=Command, examples=["coordinator revoke pi-1"])
@click.argument("name")
@deployment_flag
def revoke(name: str, folder: Path) -> None:
    """Revoke a device: its connection ends at once; its certificate and unused tokens become invalid."""
    from coordinator.deployment.folder import Deployment
    from coordinator.deployment.service import applied_generation, is_served

    deployment = Deployment.open(folder)
    with deployment.change() as rows:
        known = rows.device(name)
        if known is None and not rows.open_tokens(time.time(), name):
            devices = [device.name for device in rows.devices()]
            known_names = ", ".join(devices[:MOST_NAMED]) + (", ..." if len(devices) > MOST_NAMED else "")
            raise ConfigError(
                f"no device is called {name!r} in {deployment.folder}; there are: {known_names or 'none'}"
            )
        rows.withdraw_tokens(name)
        if known is not None:
            rows.revoke(name, time.time())
        generation = rows.generation()
    until = time.monotonic() + APPLY_S
    while is_served(deployment) and applied_generation(deployment) < generation:
        if time.monotonic() > until:
            raise LinkDown(
                f"{name} is revoked, but the coordinator of the deployment does not apply it: restart the broker"
            )
        time.sleep(TICK_S)
    click.echo(f"{name} is revoked")
    if not is_served(deployment):
        click.echo("no coordinator serves this deployment now; an external mosquitto must be restarted", err=True)
