"""`coordinator devices`: lists the devices of a deployment."""

import json
import time
from collections.abc import Callable, Collection
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import deployment_flag
from coordinator.record.opening import open_existing_record
from coordinator.run_view import read_standings
from coordinator.security import clock
from coordinator.security.folder import Deployment
from coordinator.security.registry import JoinedDevice
from coordinator.security.rotating import find_trusted
from coordinator.security.rotations import RotationRows
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

    if run and runs is None:
        raise ConfigError("FV1318", f"--run {run}: --runs is missing, the folder of all runs")
    deployment = Deployment.open(folder)
    if confirm_clock:
        clock.confirm_clock(deployment)
    with deployment.registry.read() as rows:
        doubt = clock.find_doubt(deployment, rows.clock_s())
        authority, known = deployment.authority, RotationRows(rows).read_authorities()
        trusted = find_trusted(rows, deployment)
        listed = [
            _as_json(device, authority.begin_s, doubt, known.get(device.name, trusted[0]), trusted)
            for device in rows.read_devices()
        ]
        waiting = rows.tokens.read_open(time.time())
    if runs is not None:
        run = _add_standings(listed, runs, run)
    if doubt:
        click.echo(doubt, err=True)
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
    for token in waiting:
        console.print(f"a token for {token.device} can be used until {clock.format_iso(token.expires_at)}")


def _add_standings(listed: list[dict[str, Any]], runs: Path, run: str | None) -> str:
    """Add strikes and quarantine of a run, by default the newest; returns its name. Raises ConfigError if none."""

    store = open_existing_record(runs)
    try:
        run = run or next((record.id for record in store.runs.read_all()), None)
        if run is None:
            raise ConfigError("FV1318", f"there is no run in {runs}")
        known = {standing.device: standing for standing in read_standings(store, run)}
        records = {record.device: record for record in store.devices.read_all(run)}
    finally:
        store.close()
    for entry in listed:
        standing, record = known.get(entry["device"]), records.get(entry["device"])
        entry |= {
            "run": run,
            "software": record.software if record else None,
            "denies": list(record.denies) if record else [],
            "battery_percent": record.totals.battery_percent if record else None,
            "charging": record.totals.charging if record else None,
            "strikes": standing.strikes if standing else 0,
            "quarantine": standing.quarantine if standing else None,
            "until_round": standing.until_round if standing else None,
        }
    return run


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


def _as_json(
    device: JoinedDevice, begin_s: float, doubt: str | None, authority: str, trusted: Collection[str]
) -> dict[str, Any]:
    """A device for people and programs; `begin_s` is where all certificates begin, `doubt` the doubt of the clock.

    `authority` is that of the device, of those that are `trusted` now.
    """
    now_s = time.time()
    state = "expired" if device.expires_at < now_s else "not yet valid" if now_s < begin_s else "valid"
    if authority not in trusted:
        state = "former authority"
    return {
        "device": device.name,
        "state": state if device.revoked_at is None else "revoked",
        "clock_in_doubt": doubt,
        "joined": clock.format_iso(device.joined_at),
        "last_seen": clock.format_iso(device.last_seen),
        "expires": clock.format_iso(device.expires_at),
        "revoked": clock.format_iso(device.revoked_at),
        "misuses": device.misuses,
        "authority": authority,
    }


def _read_time(key: str) -> Callable[[dict[str, Any]], str]:
    """Return a reader of a time, to the minute."""
    return lambda entry: (entry[key] or "never").replace("T", " ")[:16]
