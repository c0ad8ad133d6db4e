"""`coordinator submit`: puts a run into the queue of a service."""

from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import run_flags
from coordinator.commands.flags import runs_flag
from coordinator.config import merge_flags, read_toml
from coordinator.operations.submitting import Submission
from coordinator.operations.submitting import submit as submit_run
from fedvit.command_line import Command, json_flag
from fedvit.files import private_files


@click.command(cls=Command, examples=["coordinator submit run.toml --rounds 50 --devices-where site=berlin"])
@click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[CONFIG]")
@click.option("--run", "name", metavar="NAME", default=None, help="Name of the run; by default date, time and method.")
@runs_flag
@json_flag
@run_flags
@private_files()
def submit(file: Path | None, name: str | None, folder: Path, as_json: bool, **flags: Any) -> None:
    """Put a run into the queue of a service: the TOML file CONFIG, overridden by flags.

    Names, values and the run to start from are checked at once. The service builds the model when the run begins, and
    marks the run as failed if that is not possible; `coordinator start --check` tries it before.
    """

    where = str(file) if file else "flags"
    values = merge_flags(read_toml(file) if file else {}, flags)
    run, warning = submit_run(folder, Submission(values, where, name))
    if warning:
        click.echo(f"warning: {warning}", err=True)
    click.echo(msgspec.json.encode({"run": run, "status": "queued", "warning": warning}).decode() if as_json else run)
