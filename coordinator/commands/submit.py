"""`coordinator submit`: puts a run into the queue of a service."""

from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from coordinator.commands.config_flags import run_flags
from coordinator.commands.flags import runs_flag
from coordinator.config import merge_flags, read_toml
from coordinator.operations.documents import SubmittedRun
from coordinator.operations.opening import find_service
from coordinator.operations.submitting import HIGHEST_PRIORITY, Submission, parse_time
from coordinator.operations.submitting import submit as submit_here
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(
    cls=Command,
    examples=[
        "coordinator submit run.toml --rounds 50 --devices-where site=berlin",
        "coordinator submit run.toml --priority 5 --at +8h",
    ],
)
@click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[CONFIG]")
@click.option("--run", "name", metavar="NAME", default=None, help="Name of the run; by default date, time and method.")
@click.option(
    "--priority",
    type=click.IntRange(-HIGHEST_PRIORITY, HIGHEST_PRIORITY),
    default=0,
    help="Place in the queue: runs of a higher priority begin first.",
)
@click.option(
    "--at",
    metavar="TIME",
    help="Begin not before a date and time, such as 2026-12-24T22:00, or from now on, such as +8h.",
)
@runs_flag
@json_flag
@run_flags
@private_files()
def submit(
    file: Path | None, name: str | None, priority: int, at: str | None, folder: Path, as_json: bool, **flags: Any
) -> None:
    """Put a run into the queue of a service: the TOML file CONFIG, overridden by flags.

    Names, values and the run to start from are checked at once. The service builds the model when the run begins, and
    marks the run as failed if that is not possible; `coordinator start --check` tries it before.
    """

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    asked = Submission(values, where, name, priority, None if at is None else parse_time(at))
    if (service := find_service()) is None:
        submitted = submit_here(folder, asked)
    else:
        remote = import_module("coordinator.operations.remote").RemoteRuns(service)
        submitted = cast(SubmittedRun, remote.submit(asked))
    if submitted.warning:
        click.echo(f"warning: {submitted.warning}", err=True)
    click.echo(msgspec.json.encode(submitted).decode() if as_json else submitted.run)
