"""`coordinator enroll`: makes a token for one device."""

import time
from contextlib import ExitStack
from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from coordinator.operations.devices import LocalDevices, check_policy
from coordinator.security.first_boot import check_boot_files, write_boot_files
from coordinator.security.folder import Deployment
from coordinator.security.service import is_served, served
from fedvit.command_line import Command, amount
from fedvit.errors import ConfigError, LinkDown
from fedvit.policy import read_policy_file
from fedvit.quantities import format_seconds, parse_seconds
from fedvit.wire.enrolment import Token

TICK_S = 0.1
LINGER_S = 5.0
"""Time for which the broker keeps running for a device that has just received its certificate."""


@click.command(
    cls=Command,
    examples=[
        "coordinator enroll pi-1",
        "coordinator enroll pi-1 --valid 10m --no-wait",
        "coordinator enroll pi-1 --boot /media/bootfs --package fedvit-edge.deb --valid 7d --no-wait",
    ],
)
@click.argument("name")
@deployment_flag
@click.option("--valid", default="1h", callback=amount(parse_seconds), metavar="TIME", help="Validity of the token.")
@click.option("--replace", is_flag=True, help="NAME may exist: the use of the token revokes the current device.")
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the device has joined, and serve the deployment meanwhile if no coordinator does.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="policy.toml of the device's owner, which the token brings to the device.",
)
@click.option(
    "--boot",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write token and package to the boot partition in DIR, so that the board joins at its first start.",
)
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    metavar="DEB",
    help="With --boot: fedvit-edge_*.deb for the board.",
)
def enroll(
    name: str,
    folder: Path,
    valid: float,
    replace: bool,
    wait: bool,
    policy: Path | None,
    boot: Path | None,
    package: Path | None,
) -> None:
    """Print a token with which one device can join, once, under NAME."""

    deployment = Deployment.open(folder)
    text = "" if policy is None else check_policy_file(policy)
    if (boot is None) != (package is None):
        raise ConfigError("FV1330", "--boot and --package belong together: give both, or neither")
    if boot and package:
        check_boot_files(boot, package)
    made = LocalDevices(deployment).invite(name, valid, replaces=replace, policy=text)
    if boot and package:
        for file in write_boot_files(boot, name, made.token, package):
            click.echo(f"wrote {file}", err=True)
        click.echo(
            f"start the board within {format_seconds(valid)}; images go into /srv/fedvit/images/CLASS/", err=True
        )
    else:
        click.echo(f"on the device, within {format_seconds(valid)}:", err=True)
        click.echo(f"edge-client join {made.token}")
    if made.publisher:
        click.echo(f"it will run graphs of publisher {made.publisher}", err=True)
    if wait:
        _wait_for_device(deployment, Token.parse(made.token).id, name, valid)


def check_policy_file(file: Path) -> str:
    """Return the text of a policy. Raises ConfigError if no device could use it, or it is too long for a token."""
    text = read_policy_file(file)
    if warning := check_policy(text, str(file)):
        click.echo(f"warning: {file}: {warning}", err=True)
    return text


def _wait_for_device(deployment: Deployment, token: str, name: str, valid_s: float) -> None:

    until = time.monotonic() + valid_s
    with ExitStack() as stack:
        service = None
        if is_served(deployment):
            click.echo("the coordinator that serves this deployment will answer it; waiting", err=True)
        else:
            service = stack.enter_context(served(deployment, lambda line: click.echo(line, err=True)))
            click.echo("waiting for it; after Ctrl-C the token stays valid", err=True)
        while not _is_used(deployment, token, name):
            if time.monotonic() > until:
                raise LinkDown("FV1302", f"{name} did not join within {format_seconds(valid_s)}; the token has expired")
            if service:
                service.watch()
            time.sleep(TICK_S)
        linger = time.monotonic() + LINGER_S
        while service and time.monotonic() < linger:  # the device receives its answer, and tests its certificate
            service.watch()
            time.sleep(TICK_S)
    click.echo(f"{name} has joined", err=True)


def _is_used(deployment: Deployment, token_id: str, name: str) -> bool:
    """Return whether the device has joined. Raises ConfigError if the token was withdrawn."""
    with deployment.registry.read() as rows:
        token = rows.tokens.find(token_id)
    if token is None or token.withdrawn:
        raise ConfigError(
            "FV1302", f"this token for {name} was withdrawn: {name} has joined with another one, or was revoked"
        )
    return token.request is not None
