"""`coordinator init`, `enroll`, `devices`, `revoke`: a deployment on the command line."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvit.command_line import amount
from fedvit.errors import ConfigError, LinkDown
from fedvit.quantities import format_seconds, parse_seconds

if TYPE_CHECKING:  # the library of certificates is loaded where one is made
    from coordinator.deployment.folder import Deployment
    from coordinator.deployment.registry import Device

DEFAULT_FOLDER = Path("deployment")
TICK_S = 0.1
APPLY_S = 10.0
MOST_NAMED = 20
"""Devices that an error message names."""
LINGER_S = 5.0
"""So long the broker stays for a device that has just got its certificate."""

_deployment = click.option(
    "--deployment",
    "folder",
    type=click.Path(path_type=Path),
    default=DEFAULT_FOLDER,
    envvar="FEDVIT_DEPLOYMENT",
    help="Folder that `coordinator init` made; or set FEDVIT_DEPLOYMENT.",
)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=DEFAULT_FOLDER)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name or address at which devices find the broker. Repeatable.",
)
@click.option("--listen", default="0.0.0.0", help="Address that the broker listens on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8883, help="For devices; 0 takes a free one.")
@click.option(
    "--enrolment-port", type=click.IntRange(0, 65535), default=8884, help="For devices that join; 0 takes a free one."
)
@click.option("--federation", default="home", help="Name under which devices and coordinator meet at the broker.")
def init(folder: Path, hosts: tuple[str, ...], listen: str, port: int, enrolment_port: int, federation: str) -> None:
    """Make a deployment: its authority, certificates, and a broker's configuration that lets in its devices alone."""
    from coordinator.broker.process import claim_port
    from coordinator.deployment.folder import Deployment, Settings, own_addresses, own_hosts

    settings = Settings(
        federation=federation,
        listen=listen,
        port=port or claim_port(listen, 0),
        enrolment_port=enrolment_port or claim_port(listen, 0),
        hosts=own_hosts(hosts, listen, own_addresses()),
    )
    deployment = Deployment.create(folder, settings)
    given = "" if folder == DEFAULT_FOLDER else f" --deployment {folder}"
    click.echo(f"deployment: {deployment.folder} (keep it secret: with it devices can be let in)")
    click.echo(f"the broker's certificate is for: {', '.join(settings.hosts)}")
    click.echo(f"next: coordinator start{given or f' --deployment {folder}'}, and for each device: "
               f"coordinator enroll NAME{given}")  # fmt: skip


@click.command()
@click.argument("name")
@_deployment
@click.option("--valid", default="1h", callback=amount(parse_seconds), metavar="TIME", help="How long it can be used.")
@click.option("--replace", is_flag=True, help="NAME may exist: what it has now is revoked when the token is used.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait until the device has joined, and answer it where no coordinator does."
)
def enroll(name: str, folder: Path, valid: float, replace: bool, wait: bool) -> None:
    """Print a token with which one device can join, once, under NAME."""
    from coordinator.deployment.folder import Deployment, make_token

    deployment = Deployment.open(folder)
    token = make_token(deployment, name, valid, replaces=replace)
    click.echo(f"on the device, within {format_seconds(valid)}:", err=True)
    click.echo(f"edge-client join {token.text()}")
    if wait:
        _wait_for_device(deployment, token.id, name, valid)


def _wait_for_device(deployment: "Deployment", token: str, name: str, valid_s: float) -> None:
    from contextlib import ExitStack

    from coordinator.deployment.service import is_served, served

    until = time.monotonic() + valid_s
    with ExitStack() as stack:
        service = None
        if is_served(deployment):
            click.echo("the coordinator that serves this deployment will answer it; waiting", err=True)
        else:
            service = stack.enter_context(served(deployment, lambda line: click.echo(line, err=True)))
            click.echo("waiting for it; Ctrl-C leaves, and the token stays valid", err=True)
        while not _is_used(deployment, token, name):
            if time.monotonic() > until:
                raise LinkDown(f"{name} did not come within {format_seconds(valid_s)}; the token has expired")
            if service:
                service.watch()
            time.sleep(TICK_S)
        linger = time.monotonic() + LINGER_S
        while service and time.monotonic() < linger:  # its answer must reach it, and it tries its certificate
            service.watch()
            time.sleep(TICK_S)
    click.echo(f"{name} has joined", err=True)


def _is_used(deployment: "Deployment", token_id: str, name: str) -> bool:
    """Whether the device has joined. Raises ConfigError when it cannot do so any more."""
    with deployment.registry.read() as rows:
        token = rows.token(token_id)
    if token is None or token.withdrawn:
        raise ConfigError(f"this token for {name} was withdrawn: {name} has joined with another one, or was revoked")
    return token.request is not None


@click.command()
@_deployment
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of all runs: devices with strikes or in quarantine there are marked.",
)
@click.option("--run", help="With --out: in this run and not in the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def devices(folder: Path, out: Path | None, run: str | None, as_json: bool) -> None:
    """List the devices of a deployment: when they joined, were seen last, and must be renewed."""
    from rich.console import Console
    from rich.text import Text

    from coordinator.deployment.folder import Deployment
    from profiles.report.terminal import column
    from profiles.report.terminal import table as new_table

    if run and out is None:
        raise ConfigError(f"--run {run}: --out is missing, the folder of all runs")
    with Deployment.open(folder).registry.read() as rows:
        listed = [_as_json(device) for device in rows.devices()]
        waiting = rows.open_tokens(time.time())
    if out is not None:
        run = _add_standings(listed, out, run)
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    table = new_table(None)
    column(table, "device", justify="left")
    table.add_column(Text("state"), overflow="fold")
    for heading in ("joined, UTC", "last seen", "certificate until"):
        column(table, heading, justify="left")
    if run:
        table.add_column(Text(f"in run {run}"), overflow="fold")
    for entry in listed:
        standing = [Text(_in_words(entry))] if run else []
        table.add_row(
            Text(entry["device"]),
            entry["state"] + (f", misused the broker {entry['misuses']} times" if entry["misuses"] else ""),
            *(_short(entry[key]) for key in ("joined", "last_seen", "expires")),
            *standing,
        )  # fmt: skip
    console = Console()
    console.print(table if listed else "no device has joined; coordinator enroll NAME lets one in")
    for token in waiting:
        console.print(f"a token for {token.device} can be used until {_iso(token.expires_at)}")


def _add_standings(listed: list[dict[str, Any]], out: Path, run: str | None) -> str:
    """How each device stands with a run, by default the newest; returns its name. Raises ConfigError without one."""
    from coordinator.commands.flags import existing_store
    from coordinator.commands.quarantine import standings

    store = existing_store(out)
    try:
        run = run or next((record.id for record in store.runs()), None)
        if run is None:
            raise ConfigError(f"there is no run in {out}")
        known = {standing.device: standing for standing in standings(store, run)}
    finally:
        store.close()
    for entry in listed:
        standing = known.get(entry["device"])
        entry |= {
            "run": run,
            "strikes": standing.strikes if standing else 0,
            "quarantine": standing.quarantine if standing else None,
            "until_round": standing.until_round if standing else None,
        }
    return run


def _in_words(entry: dict[str, Any]) -> str:
    if entry["quarantine"]:
        until = "" if entry["until_round"] is None else f" until round {entry['until_round']}"
        return f"quarantine{until}: {entry['quarantine']}"
    strikes = entry["strikes"]
    return f"{strikes} strike{'' if strikes == 1 else 's'}" if strikes else "-"


def _as_json(device: "Device") -> dict[str, Any]:
    expired = device.expires_at < time.time()
    return {
        "device": device.name,
        "state": "revoked" if device.revoked_at is not None else "expired" if expired else "valid",
        "joined": _iso(device.joined_at),
        "last_seen": _iso(device.last_seen),
        "expires": _iso(device.expires_at),
        "revoked": _iso(device.revoked_at),
        "misuses": device.misuses,
    }


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _short(text: str | None) -> str:
    """To the minute."""
    return (text or "never").replace("T", " ")[:16]


@click.command()
@click.argument("name")
@_deployment
def revoke(name: str, folder: Path) -> None:
    """Shut a device out: its connection ends at once, its certificate and its open tokens are worth nothing."""
    from coordinator.deployment.folder import Deployment
    from coordinator.deployment.service import applied_generation, is_served

    deployment = Deployment.open(folder)
    with deployment.change() as rows:
        known = rows.device(name)
        if known is None and not rows.open_tokens(time.time(), name):
            devices = [device.name for device in rows.devices()]
            there = ", ".join(devices[:MOST_NAMED]) + (", ..." if len(devices) > MOST_NAMED else "")
            raise ConfigError(f"no device is called {name!r} in {deployment.folder}; there are: {there or 'none'}")
        rows.withdraw_tokens(name)
        if known is not None:
            rows.revoke(name, time.time())
        generation = rows.generation()
    until = time.monotonic() + APPLY_S
    while is_served(deployment) and applied_generation(deployment) < generation:
        if time.monotonic() > until:
            raise LinkDown(
                f"{name} is revoked, but the coordinator that serves the deployment does not answer: restart the broker"
            )
        time.sleep(TICK_S)
    click.echo(f"{name} is revoked")
    if not is_served(deployment):
        click.echo(
            "no coordinator serves this deployment now; a mosquitto that runs by itself must be restarted", err=True
        )
