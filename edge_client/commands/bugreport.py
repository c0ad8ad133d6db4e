"""`edge-client bugreport`: packs what is needed to find a fault on this device."""

import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec

from edge_client.commands.doctor import make_context
from edge_client.commands.options import DEVICE_OPTIONS, program_options, read_settings
from edge_client.health.doctor import lines, run_checks
from edge_client.health.status import read_status
from edge_client.settings import DeviceSettings
from edge_client.storage.state import state_folder, status_file
from fedvit.bug_report import BugReport, print_and_write
from fedvit.command_line import Command
from fedvit.data.layout import TEST, TRAIN, UNLABELLED
from fedvit.errors import FedvitError

UNIT = "fedvit-edge.service"
JOURNAL = ("journalctl", "--unit", UNIT, "--lines", "2000", "--no-pager", "--output", "short-iso")
PATIENCE_S = 20.0
MOST_DECODED = 20
MOST_NAMES = 200_000
"""Files of the owner whose names are looked for."""


@click.command(
    "bugreport",
    cls=Command,
    params=program_options(*DEVICE_OPTIONS, "test_share", "vault_key"),
    examples=["edge-client bugreport --data ~/images", "edge-client bugreport --data ~/images --log client.log"],
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("fedvit-edge-report.zip"), help="File to write.")
@click.option("--log", type=click.Path(path_type=Path), help="Log of this device; by default that of its systemd unit.")
@click.pass_context
def command(context: click.Context, /, *, out: Path, log: Path | None, **own: Any) -> None:
    """Write a ZIP file for the report of a fault: versions, settings, status, checks, the last log lines.

    It has no images, names of files and classes, keys, passwords, tokens or addresses. Look into it before you send it.
    """
    settings = read_settings(context, own)
    report = BugReport(
        find_private_names(settings.data),
        folders=[settings.data] if settings.data else (),
        secrets=[secret for secret in (settings.broker, settings.home and settings.home.password) if secret],
    )
    report.add_machine()
    report.add_object("settings.json", {**vars(settings), "policy": msgspec.to_builtins(settings.policy)})
    click.echo("checking this device", err=True)
    add_checks(report, settings)
    report.add("log.txt", read_journal()) if log is None else report.add_file("log.txt", log)
    print_and_write(report, out)


def find_private_names(data: Path | None) -> set[str]:
    """Find the names of an owner's class folders and files, of which messages may name one without its path."""
    if data is None:
        return set()
    names = {path.name for path in islice(data.rglob("*"), MOST_NAMES)}
    return names - {TRAIN, TEST, UNLABELLED}


def add_checks(report: BugReport, settings: DeviceSettings) -> None:
    """Add the findings of `doctor`, the status and a list of the state's files; what fails is said in its place."""
    try:
        checked = make_context(settings, MOST_DECODED)
        report.add("doctor.txt", "\n".join(lines(finding) for finding in run_checks(checked)))
        folder = state_folder(settings.data, settings.state)
        report.add_folder("state.txt", folder)
        report.add_object("status.json", read_status(status_file(folder)))
    except FedvitError as error:
        report.add("failed.txt", f"{error.code}: {error}\n")


def read_journal() -> str:
    """Read the last lines of the device's unit; without systemd a line that says so."""
    try:
        done = subprocess.run(
            JOURNAL, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no journal of {UNIT}: {error}\n"
    return done.stdout or f"no journal of {UNIT}: {done.stderr}"
