"""`coordinator wait`: waits until a run has ended."""

import json
import time
from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.record.opening import newest_run, open_existing_record
from coordinator.record.tables import ENDED
from coordinator.run_view import RunHead, read_head
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
    store = open_existing_record(folder)
    began, name, reported = time.monotonic(), run or newest_run(store, folder), ""
    try:
        while True:
            head = read_head(store, store.runs.read(name))
            number = store.rounds.find_last(name)
            if (line := _describe(head, number)) != reported:
                reported = line
                click.echo(escape_line(line), err=True)
            if head.status in (*ENDED, "failed"):
                break
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise LinkDown("FV1526", f"{line}; it has not ended within {format_seconds(timeout_s)}")
            time.sleep(LOOK_EVERY_S)
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(msgspec.structs.asdict(head), indent=2))
    if head.status != "finished":
        raise FedvitError("FV1525", line)


def _describe(head: RunHead, number: int) -> str:
    reason = f": {head.reason}" if head.reason else ""
    return f"run {head.run}: {head.status}{reason}, round {number} of {head.rounds_planned}"
