"""`coordinator adopt`: admits devices that ask for it in the local network."""

import time
from contextlib import ExitStack
from pathlib import Path

import click

from coordinator.commands.enroll import check_policy_file, wait_for_devices
from coordinator.commands.flags import deployment_flag
from coordinator.operations.devices import LocalDevices
from coordinator.security.adoption import AdoptionWindow, Applicant
from coordinator.security.announcing import announce_listener
from coordinator.security.folder import Deployment
from fedvit.command_line import Command, amount
from fedvit.errors import ConfigError, FedvitError
from fedvit.quantities import format_seconds, parse_seconds
from fedvit.transport.address import Address
from fedvit.wire.adoption import ADOPTION_PORT
from fedvit.wire.enrolment import Token

TOKEN_S = 600.0
"""Validity of the token that a device gets."""
TRIES = 3
RELAYED = "If its screen does show this code, somebody relays between both: refuse here, and answer no there"


@click.command(
    cls=Command, examples=["coordinator adopt", "coordinator adopt --listen 192.168.1.5 --window 1h --count 3"]
)
@deployment_flag
@click.option(
    "--listen", default=f"0.0.0.0:{ADOPTION_PORT}", metavar="HOST[:PORT]", help="Address at which devices may ask."
)
@click.option(
    "--window", default="10m", callback=amount(parse_seconds), metavar="TIME", help="How long devices may ask."
)
@click.option("--count", type=click.IntRange(min=1), default=1, help="End after so many devices.")
@click.option("--replace", is_flag=True, help="A device may take the name of one that has joined, which is revoked.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="policy.toml of the devices' owner, which they get with their tokens.",
)
def adopt(folder: Path, listen: str, window: float, count: int, replace: bool, policy: Path | None) -> None:
    """Admit devices that ask for it in the local network, each after its code was typed here.

    On the device, `edge-client join` without a token finds this coordinator and shows a code of six digits.
    """
    deployment = Deployment.open(folder)
    text = check_policy_file(policy) if policy else ""
    address = Address.parse(f"mqtt://{listen}")
    port = address.port if ":" in listen else ADOPTION_PORT
    name = f"{deployment.settings.federation} at {deployment.address.host}"
    devices, joined = LocalDevices(deployment), 0
    with ExitStack() as stack:
        opened = stack.enter_context(AdoptionWindow(name, address.host, port))
        stack.enter_context(announce_listener(name, opened.host, opened.port, lambda line: click.echo(line, err=True)))
        click.echo(
            f"for {format_seconds(window)} devices may ask at {opened.host}:{opened.port}; on each: edge-client join",
            err=True,
        )
        for applicant in opened.wait(time.monotonic() + window):
            if applicant and (invited := _ask_for_code(applicant, devices, text, replaces=replace)):
                wait_for_devices(deployment, {Token.parse(invited).id: applicant.device}, TOKEN_S)
                joined += 1
            if joined == count:
                return
    raise ConfigError("FV1342", f"{joined} of {count} devices were adopted within {format_seconds(window)}")


def _ask_for_code(applicant: Applicant, devices: LocalDevices, policy: str, *, replaces: bool) -> str | None:
    """Let the operator type the code; return the token that the device got, None if it is not adopted."""
    click.echo(f"{applicant.device} at {applicant.address} asks to join", err=True)
    for _ in range(TRIES):
        typed = click.prompt(f"code on the screen of {applicant.device}, or nothing to refuse", "", show_default=False)
        if not typed:
            break
        if not applicant.is_there():
            click.echo(f"{applicant.device} has ended; start it again", err=True)
            return None
        if not applicant.has_code(typed):
            click.echo(f"not the code of the device that asks: type it again. {RELAYED}", err=True)
            continue
        try:
            token = devices.invite(applicant.device, TOKEN_S, replaces=replaces, policy=policy).token
            applicant.grant(token)
        except FedvitError as error:
            applicant.refuse(str(error))
            click.echo(f"{applicant.device} was not adopted: {error} [{error.code}]", err=True)
            return None
        click.echo(f"the code is right: {applicant.device} may join; answer yes there", err=True)
        return token
    applicant.refuse("its code was not typed there")
    return None
