"""`edge-client join`: the device joins a deployment."""

import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_client.commands.options import program_options, read_settings
from edge_client.link.adoption import Agreed, ask_adoption
from edge_client.link.discovery import Coordinator, find_coordinators
from edge_client.link.identity import host_and_port
from edge_client.link.join import join
from edge_client.storage.state import identity_folder
from edge_client.trust.known_graphs import check_token_publisher
from edge_client.trust.policy import check_token_policy
from fedvit import hints
from fedvit.command_line import Command, amount
from fedvit.errors import ConfigError, LinkDown
from fedvit.policy import describe_policy
from fedvit.quantities import parse_seconds
from fedvit.wire.adoption import ADOPTION_PORT
from fedvit.wire.enrolment import Token

MAX_TOKEN_CHARACTERS = 16_384
CLOCK_HINT = "set the clock: sudo timedatectl set-ntp true"


@click.command(
    "join",
    cls=Command,
    params=program_options("broker", "state", "device"),
    examples=["edge-client join TOKEN", "edge-client join", "edge-client join --from coordinator.lan --id pi-3"],
)
@click.argument("token", required=False)
@click.option(
    "--from",
    "coordinator",
    metavar="HOST[:PORT]",
    help="Coordinator to ask without a token; by default those are listed that announce themselves in the network.",
)
@click.option(
    "--enrolment-port",
    type=click.IntRange(1, 65535),
    help="Port of the broker's enrolment listener, if it is not the default.",
)
@click.option("--replace", is_flag=True, help="Forget an earlier deployment of this device.")
@click.option("--replace-policy", is_flag=True, help="Use the token's policy in place of the one on this device.")
@click.option("--replace-publisher", is_flag=True, help="Trust the token's publisher in place of the former one.")
@click.option("--patience", default="60s", callback=amount(parse_seconds), metavar="TIME", help="How long to try.")
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    token: str | None,
    coordinator: str | None,
    enrolment_port: int | None,
    replace: bool,
    replace_policy: bool,
    replace_publisher: bool,
    patience: float,
    **own: Any,
) -> None:
    """Join a deployment with the one-time TOKEN of coordinator enroll.

    TOKEN may be @FILE, which holds it. Without a token the device asks a coordinator in the local network, and shows a
    code that its operator types into coordinator adopt. From then on no flag is needed to reach its broker. A policy in
    the token is stored, and shown.
    """

    settings = read_settings(context, own)
    host, port = host_and_port(settings.broker) if settings.broker else (None, None)
    invitation = Token.parse(read_token(token) if token else get_adopted(coordinator, settings.device))
    invitation = msgspec.structs.replace(
        invitation,
        host=host or invitation.host,
        port=port or invitation.port,
        enrolment_port=enrolment_port or invitation.enrolment_port,
    )
    folder = identity_folder(settings.state)
    check_token_policy(folder.parent, invitation.policy, replace=replace_policy)
    check_token_publisher(folder.parent, invitation.publisher, replace=replace_publisher)
    joined = join(
        invitation,
        folder,
        replace=replace,
        patience_s=patience,
        report=lambda line: click.echo(line, err=True),
    )
    device = joined.identity.membership.device
    click.echo(f"joined as {device!r}; certificate: {joined.identity.certificate}")
    if invitation.policy or invitation.publisher:
        settings = read_settings(context, own)
    for line in describe_policy(settings.policy):
        click.echo(line)
    if joined.trouble:
        click.echo(f"but a first connection failed: {joined.trouble}\n{hint_for(joined.trouble)}", err=True)
    state = ("--state", settings.state) if settings.state else ()
    click.echo(f"next: {hints.command('edge-client', '--data', 'FOLDER', *state)}")


def get_adopted(coordinator: str | None, device: str | None) -> str:
    """Return the token that a coordinator gives after the code was compared. Raises FedvitError."""
    if coordinator:
        host, port = host_and_port(coordinator)
        chosen = Coordinator(coordinator, host, port or ADOPTION_PORT)
    else:
        click.echo("looking for coordinators in the network", err=True)
        chosen = choose_coordinator(find_coordinators())
    name = device or re.sub("[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0]).lstrip("-") or "device"
    click.echo(f"asking {chosen.name} ({chosen.host}:{chosen.port}) to adopt {name}", err=True)

    def show(agreed: Agreed) -> None:
        click.echo(f"type this code there, into coordinator adopt of {agreed.coordinator}:\n\n    {agreed.code}\n")

    def confirm(agreed: Agreed) -> bool:
        return click.confirm(f"Did {agreed.coordinator} say that the code {agreed.code} is right?", default=False)

    return ask_adoption(chosen.host, chosen.port, name, show, confirm)


def choose_coordinator(found: Sequence[Coordinator]) -> Coordinator:
    """Let the owner choose where there are several. Raises LinkDown without one."""
    if not found:
        raise LinkDown(
            "FV1342",
            "no coordinator in this network answers: run `coordinator adopt` on the server, name it by "
            "`edge-client join --from HOST`, or copy a token of `coordinator enroll NAME`",
        )
    for number, one in enumerate(found, start=1):
        click.echo(f"{number}  {one.name}  {one.host}:{one.port}")
    if len(found) == 1:
        return found[0]
    number = click.prompt("which one", type=click.IntRange(1, len(found)))
    return found[int(number) - 1]


def read_token(text: str) -> str:
    """Return a token as it was given, or the content of FILE for `@FILE`. Raises ConfigError without the file."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text("ascii")[:MAX_TOKEN_CHARACTERS]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FV1301", f"the token in {text[1:]} cannot be read: {error}") from None


def hint_for(trouble: str) -> str:
    """A hint for a new certificate that does not work."""
    if "mismatch" in trouble or "not valid for" in trouble:
        return "use a --broker that the server's certificate is for (coordinator init says which)"
    if "expired" in trouble or "not yet valid" in trouble:
        return f"{CLOCK_HINT}; this device's clock says {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return "edge-client doctor looks for the cause"
