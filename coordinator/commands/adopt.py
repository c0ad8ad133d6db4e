"""`coordinator adopt`: admits devices that ask for it in the local network."""

import time
from contextlib import ExitStack
from pathlib import Path

import click

from coordinator.commands.enroll import check_policy_file, wait_for_devices
from coordinator.commands.flags import deployment_flag
from coordinator.security.adoption import Applicant
from coordinator.security.adoption_service import RELAYED, TOKEN_S, TRIES, grant, open_window
from coordinator.security.announcing import announce_listener
from coordinator.security.folder import Deployment
from fedvit.command_line import Command, amount
from fedvit.errors import ConfigError, FedvitError
from fedvit.quantities import format_seconds, parse_seconds
from fedvit.wire.adoption import ADOPTION_PORT
from fedvit.wire.enrolment import Token


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
    joined = 0
    with ExitStack() as stack:
        opened = stack.enter_context(open_window(deployment, listen))
        stack.enter_context(
            announce_listener(opened.coordinator, opened.host, opened.port, lambda line: click.echo(line, err=True))
        )
        click.echo(
            f"for {format_seconds(window)} devices may ask at {opened.host}:{opened.port}; on each: edge-client join",
            err=True,
        )
        for applicant in opened.wait(time.monotonic() + window):
            if applicant and (token := _ask_for_code(applicant, deployment, text, replaces=replace)):
                wait_for_devices(deployment, {token.id: applicant.device}, TOKEN_S)
                joined += 1
            if joined == count:
                return
    raise ConfigError("FV1342", f"{joined} of {count} devices were adopted within {format_seconds(window)}")


def _ask_for_code(applicant: Applicant, deployment: Deployment, policy: str, *, replaces: bool) -> Token | None:
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
            token = grant(applicant, deployment, replaces=replaces, policy=policy)
        except FedvitError as error:
            click.echo(f"{applicant.device} was not adopted: {error} [{error.code}]", err=True)
            return None
        click.echo(f"the code is right: {applicant.device} may join; answer yes there", err=True)
        return token
    applicant.refuse("its code was not typed there")
    return None
