"""`coordinator submit`: puts a run into the queue of a service."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.config_flags import run_flags
from coordinator.commands.flags import runs_flag
from coordinator.config import (
    RunConfig,
    check_blobs,
    check_settings,
    make_config,
    merge_flags,
    read_toml,
    why_not_asked,
)
from coordinator.record.opening import has_record, open_private_record
from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from coordinator.rounds.service.status import labels_seen, read_service_status
from coordinator.serving.request import usual_name
from coordinator.serving.start import check_new, check_start_from, check_trackers
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.wire.topics import check_name


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
    if "broker" in values:
        raise ConfigError(
            "FV1023", f"{where}: [broker] is for `coordinator start` and `serve`; this run uses its service's broker"
        )
    config = make_config(values, where).run
    check_settings(config, where)
    check_trackers(config, where)
    check_blobs(config.blobs, where)
    run = check_name(name or usual_name(config), "--run")
    with ExitStack() as stack:
        known = open_private_record(folder, stack) if has_record(folder) else None
        check_new(known, run)
        _check_earlier_run(config, known)
        warning = _warning(config, folder)
        recorded = msgspec.to_builtins(config)
        if "federation" not in values:  # the service's federation is used
            del recorded["federation"]
        open_private_record(folder, stack).runs.submit(run, recorded)
    if warning:
        click.echo(f"warning: {warning}", err=True)
    click.echo(msgspec.json.encode({"run": run, "status": "queued", "warning": warning}).decode() if as_json else run)


def _check_earlier_run(config: RunConfig, store: Record | None) -> None:
    """Raise ConfigError if the run that this one starts from does not exist, or has ended without a round."""
    if config.start_from is None:
        return

    if store is None or store.runs.read(config.start_from).status in ENDED:
        check_start_from(store, config)


def _warning(config: RunConfig, folder: Path) -> str | None:
    """A warning if no known device has the labels of the run."""

    status = read_service_status(folder)
    fits = status and any(why_not_asked(config.devices_where, member.labels) is None for member in status.members)
    if status is None or not config.devices_where or fits:
        return None
    seen = ", ".join(labels_seen(status)) or "none"
    return (
        f"devices_where = {config.devices_where!r}: no device that the service has seen has these labels; existing "
        f"labels: {seen}. The run waits for such devices"
    )
