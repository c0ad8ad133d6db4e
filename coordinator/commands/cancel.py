"""`coordinator cancel`: ends a run, which cannot be resumed."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from coordinator.commands.flags import existing_store, runs_flag
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.files import private_files

if TYPE_CHECKING:
    pass


@click.command(cls=Command, examples=["coordinator cancel RUN"])
@click.argument("run")
@runs_flag
@json_flag
@private_files()
def cancel(run: str, folder: Path, as_json: bool) -> None:
    """Cancel RUN: at once if it is queued, within seconds if it is being served. It cannot be resumed."""
    from coordinator.record.retention import is_served

    store = existing_store(folder, writes=True)
    try:
        record = store.run(run)
        if record.status in ("finished", "failed", "cancelled"):
            raise ConfigError(f"run {run!r} is {record.status} already")
        store.cancel_run(run)
        served = is_served(folder / run)
        if not served and store.run(run).status != "cancelled":  # its process was killed
            store.update_run(run, status="cancelled")
        status = store.run(run).status
    finally:
        store.close()
    if as_json:
        click.echo(msgspec.json.encode({"run": run, "status": status}).decode())
    else:
        click.echo(f"run {run}: " + ("cancelled" if status == "cancelled" else "its coordinator ends it now"))
