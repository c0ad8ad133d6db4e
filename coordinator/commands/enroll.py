"""`coordinator enroll`: makes tokens, each for one device."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from coordinator.commands.flags import deployment_flag
from coordinator.operations.devices import LocalDevices, check_policy
from coordinator.operations.documents import Invitation
from coordinator.security.first_boot import UpdateSource, check_boot_files, write_boot_files
from coordinator.security.folder import Deployment
from coordinator.security.service import is_served, served
from coordinator.security.serving_lock import is_wanted
from fedvit.command_line import Command, amount, json_flag, print_json
from fedvit.errors import ConfigError, LinkDown
from fedvit.minisign import parse_any_key
from fedvit.policy import read_policy_file
from fedvit.quantities import format_seconds, parse_seconds
from fedvit.wire.enrolment import Token

TICK_S = 0.1
LINGER_S = 5.0
"""Time for which the broker keeps running for a device that has just received its certificate."""
MOST_AT_ONCE = 10_000
JOIN = "edge-client join"
MOST_NAMED = 20
"""Most devices that an error message names."""


@click.command(
    cls=Command,
    examples=[
        "coordinator enroll pi-1",
        "coordinator enroll pi-1 pi-2 --valid 10m --no-wait",
        "coordinator enroll device --count 200 --no-wait --json",
        "coordinator enroll pi-1 --boot /media/bootfs --package fedvit-edge.deb --valid 7d --no-wait",
    ],
)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@deployment_flag
@click.option(
    "--count",
    type=click.IntRange(1, MOST_AT_ONCE),
    help="Make tokens for so many devices, called NAME-0, NAME-1 and so on.",
)
@click.option("--valid", default="1h", callback=amount(parse_seconds), metavar="TIME", help="Validity of the tokens.")
@click.option("--replace", is_flag=True, help="NAME may exist: the use of the token revokes the current device.")
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the devices have joined, and serve the deployment meanwhile if no coordinator does.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="policy.toml of the devices' owner, which the tokens bring to the devices.",
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
@click.option("--updates", metavar="SOURCE", help="With --boot: folder or URL of releases that the board looks into.")
@click.option("--update-key", metavar="KEY", help="With --updates: public key of the releases that it installs.")
@json_flag
def enroll(
    names: tuple[str, ...],
    folder: Path,
    count: int | None,
    valid: float,
    replace: bool,
    wait: bool,
    policy: Path | None,
    boot: Path | None,
    package: Path | None,
    updates: str | None,
    update_key: str | None,
    as_json: bool,
) -> None:
    """Print a token with which one device can join, once, under NAME; for several names one for each."""

    if count is not None:
        if len(names) > 1:
            raise click.UsageError(f"--count {count} needs one NAME, from which the names of the devices are made")
        names = tuple(f"{names[0]}-{number}" for number in range(count))
    deployment = Deployment.open(folder)
    text = "" if policy is None else check_policy_file(policy)
    if (boot is None) != (package is None):
        raise ConfigError("FV1330", "--boot and --package belong together: give both, or neither")
    if (updates is None) != (update_key is None) or (updates and not boot):
        raise ConfigError("FV1330", "--updates and --update-key belong together, and need --boot")
    releases = UpdateSource(updates, parse_any_key(update_key)) if updates and update_key else None
    if boot and package:
        if len(names) > 1:
            raise click.UsageError("--boot writes one card: name one device")
        check_boot_files(boot, package)
    made = LocalDevices(deployment).invite_all(names, valid, replaces=replace, policy=text)
    if boot and package:
        for file in write_boot_files(boot, names[0], made[0].token, package, releases):
            click.echo(f"wrote {file}", err=True)
    if as_json:
        print_json(made if len(made) > 1 else made[0])
    else:
        for line in _describe(made, valid, on_card=boot is not None):
            click.echo(line, err=not line.startswith(JOIN))
    if made[0].publisher:
        click.echo(f"it will run graphs of publisher {made[0].publisher}", err=True)
    if wait:
        wait_for_devices(deployment, {Token.parse(one.token).id: one.device for one in made}, valid)


def _describe(made: Sequence[Invitation], valid_s: float, *, on_card: bool) -> Iterator[str]:
    """Yield what to do with tokens; `on_card`: the one token is on the card of a board."""
    within = f"within {format_seconds(valid_s)}"
    if on_card:
        yield f"start the board {within}; images go into /srv/fedvit/images/CLASS/"
        return
    yield f"on the device, {within}:" if len(made) == 1 else f"on each device its line, {within}:"
    for one in made:
        if len(made) > 1:
            yield f"{one.device}:"
        yield f"{JOIN} {one.token}"


def check_policy_file(file: Path) -> str:
    """Return the text of a policy. Raises ConfigError if no device could use it, or it is too long for a token."""
    text = read_policy_file(file)
    if warning := check_policy(text, str(file)):
        click.echo(f"warning: {file}: {warning}", err=True)
    return text


def wait_for_devices(deployment: Deployment, devices: dict[str, str], valid_s: float) -> None:
    """Wait until each of these devices has joined, by the ids of their tokens."""
    until, waiting = time.monotonic() + valid_s, dict(devices)
    with ExitStack() as stack:
        service = None
        if is_served(deployment):
            click.echo("the coordinator that serves this deployment will answer; waiting", err=True)
        else:
            service = stack.enter_context(served(deployment, lambda line: click.echo(line, err=True), for_now=True))
            what = "it; after Ctrl-C the token stays" if len(waiting) == 1 else "them; after Ctrl-C the tokens stay"
            click.echo(f"waiting for {what} valid", err=True)
        while waiting:
            if time.monotonic() > until:
                left = ", ".join(list(waiting.values())[:MOST_NAMED])
                raise LinkDown("FV1302", f"{left} did not join within {format_seconds(valid_s)}; the token has expired")
            for token in _list_used(deployment, waiting):
                click.echo(f"{waiting.pop(token)} has joined", err=True)
            if service:
                service.watch()
                if is_wanted(deployment.folder):
                    stack.close()
                    service = None
                    click.echo("a coordinator serves this deployment now; waiting", err=True)
            time.sleep(TICK_S)
        linger = time.monotonic() + LINGER_S
        while service and time.monotonic() < linger:  # the last device receives its answer, and tests its certificate
            service.watch()
            time.sleep(TICK_S)


def _list_used(deployment: Deployment, waiting: dict[str, str]) -> list[str]:
    """Return the tokens with which devices have joined. Raises ConfigError if one was withdrawn."""
    with deployment.registry.read() as rows:
        tokens = {token.id: token for token in rows.tokens.read_all()}
    for token_id, name in waiting.items():
        if token_id not in tokens or tokens[token_id].withdrawn:
            raise ConfigError(
                "FV1302", f"this token for {name} was withdrawn: {name} has joined with another one, or was revoked"
            )
    return [token for token in waiting if tokens[token].request is not None]
