"""`coordinator wait`: waits until a run has ended."""

import json
import time
from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
from coordinator.record.tables import ENDED
from coordinator.run_view import RunHead, RunProgress
from fedvit.command_line import Command, amount, json_flag
from fedvit.errors import FedvitError, LinkDown
from fedvit.quantities import format_seconds, parse_seconds
from fedvit.terminal import escape_line

LOOK_EVERY_S = 0.5


@click.command(cls=Command, examples=["coordinator wait RUN", "coordinator wait RUN --timeout 8h"])
@click.argument("run", required=False)
@click.option(
    "--timeout",
    "timeout_s",
    callback=amount(parse_seconds),
    metavar="TIME",
    help="Longest time, e.g. 8h; by default any.",
)
@runs_flag
@json_flag
def wait(run: str | None, folder: Path, timeout_s: float | None, as_json: bool) -> None:
    """Wait until RUN, by default the newest, has ended; its rounds and states are printed as they come.

    Succeeds if the run finishes. Ends with code 1 if it fails or is cancelled, with code 4 after --timeout. A run that
    is interrupted may be resumed, and is waited for.
    """
    began, reported = time.monotonic(), ""
    with open_runs(folder) as runs:
        name = runs.resolve(run)
        while True:
            head = runs.read_progress(name)
            if (line := _describe(head)) != reported:
                reported = line
                click.echo(escape_line(line), err=True)
            if head.status in (*ENDED, "failed"):
                break
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise LinkDown("FV1526", f"{line}; it has not ended within {format_seconds(timeout_s)}")
            time.sleep(LOOK_EVERY_S)
    if as_json:
        click.echo(json.dumps({name: getattr(head, name) for name in RunHead.__struct_fields__}, indent=2))
    if head.status != "finished":
        raise FedvitError("FV1525", line)


def _describe(head: RunProgress) -> str:
    reason = f": {head.reason}" if head.reason else ""
    return f"run {head.run}: {head.status}{reason}, round {head.rounds} of {head.rounds_planned}"
