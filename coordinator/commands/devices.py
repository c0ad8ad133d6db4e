"""`coordinator devices`: lists the devices of a deployment."""

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import deployment_flag
from coordinator.operations.opening import find_service, open_devices
from coordinator.security import clock
from coordinator.security.folder import Deployment
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.hints import command
from profiles.report.console import Console
from profiles.report.tables import Column, Sheet

UNKNOWN = "graphs that its publisher has not signed"


@click.command(
    cls=Command, examples=["coordinator devices --deployment deployment", "coordinator devices --runs runs --json"]
)
@deployment_flag
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Folder of all runs: shows the version of each device there, its strikes and its quarantine.",
)
@click.option("--run", help="With --runs: the run, by default the newest.")
@click.option(
    "--confirm-clock",
    is_flag=True,
    help="This machine's clock is right, though it differs by more than a day from the newest date of the deployment: "
    "issue certificates by it again.",
)
@json_flag
def devices(folder: Path, runs: Path | None, run: str | None, confirm_clock: bool, as_json: bool) -> None:
    """List the devices of a deployment: when they joined, were last seen, and when their certificates expire."""

    if run and runs is None and find_service() is None:
        raise ConfigError("FV1318", f"--run {run}: --runs is missing, the folder of all runs")
    if confirm_clock:
        if find_service() is not None:
            raise ConfigError("FV1817", "--confirm-clock works on this machine only: leave out --server")
        clock.confirm_clock(Deployment.open(folder))
    found = open_devices(folder, runs).list_all(run, with_standings=runs is not None or run is not None)
    listed, run = found.devices, found.run
    if found.doubt:
        click.echo(found.doubt, err=True)
    if as_json:
        click.echo(json.dumps(listed, indent=2))
        return
    times = {"joined_at": "joined, UTC", "last_seen_at": "last seen", "expires_at": "certificate until"}
    shown = [
        Column("device", "device", itemgetter("device")),
        Column("state", "state", _state, is_long=True),
        *(Column(name, heading, _read_time(name.removesuffix("_at"))) for name, heading in times.items()),
    ]
    if len({entry["authority"] for entry in listed}) > 1:
        shown.append(Column("authority", "authority", lambda entry: entry["authority"][:16]))
    if run:
        shown.append(Column("version", "version", itemgetter("software")))
        if any(entry["battery_percent"] is not None for entry in listed):
            shown.append(Column("battery", "battery", _battery))
        shown.append(Column("standing", f"in run {run}", _standing, is_long=True))
    console = Console()
    enroll = command("coordinator", "enroll", "NAME", deployment=folder)
    table = Sheet(listed, shown, unknown="-").draw(None, console.width)
    console.print(table if listed else f"no device has joined; {enroll} makes a token for one")
    for entry in listed:
        denied = [key for key in entry.get("denies", ()) if key != "class_counts"]  # which no run needs
        if denied := [UNKNOWN if key == "methods" else key for key in denied]:
            console.print(f"{entry['device']} does not allow {', '.join(denied)}")
    for token in found.waiting:
        console.print(f"a token for {token.device} can be used until {token.expires}")


def _state(entry: dict[str, Any]) -> str:
    by = " by this machine's clock" if entry["clock_in_doubt"] and entry["state"] != "revoked" else ""
    misuse = f", misused the broker {entry['misuses']} times" if entry["misuses"] else ""
    return f"{entry['state']}{by}{misuse}"


def _battery(entry: dict[str, Any]) -> str:
    """The charge at the end of the newest task; "-" without a battery."""
    percent = entry["battery_percent"]
    return "-" if percent is None else f"{percent} %{', charging' if entry['charging'] else ''}"


def _standing(entry: dict[str, Any]) -> str:
    if entry["quarantine"]:
        until = "" if entry["until_round"] is None else f" until round {entry['until_round']}"
        return f"quarantine{until}: {entry['quarantine']}"
    strikes = entry["strikes"]
    return f"{strikes} strike{'' if strikes == 1 else 's'}" if strikes else "-"


def _read_time(key: str) -> Callable[[dict[str, Any]], str]:
    """Return a reader of a time, to the minute."""
    return lambda entry: (entry[key] or "never").replace("T", " ")[:16]
