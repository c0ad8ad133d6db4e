"""The work of `coordinator start` before its run is served: which run it is, and whether it may begin.

This module imports the record; numpy and the engine are loaded when all of that is clear.
"""

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.config import (
    FREE_TABLES,
    StartConfig,
    check_blobs,
    check_kind,
    make_config,
    resume_config,
    with_listen_port,
)
from coordinator.record.database import ADDRESS_FILE, use_database
from coordinator.record.opening import has_record, open_private_record
from coordinator.record.record import Record
from coordinator.record.tables import ENDED, RunRecord
from coordinator.rounds.alerts import webhook_of
from coordinator.rounds.display import choose_display
from coordinator.serving.checks import check_new, check_start_from, check_trackers
from coordinator.serving.request import StartRequest, usual_name
from fedvit.errors import ConfigError
from fedvit.wire.topics import check_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.rounds.leading import Lead
    from coordinator.rounds.parts import RunParts


@dataclass(frozen=True)
class RunToStart:
    """The run that a request is about; `record` is what an earlier start left of it."""

    name: str
    config: StartConfig
    store: Record | None  # None: this run is the first of the folder
    record: RunRecord | None


def start_run(request: StartRequest, lead: "Callable[[RunParts], Lead] | None" = None) -> None:
    """Serve one run until it is finished.

    `lead` leads the run of a region; None: the run is not that of a region. Raises FedvitError if the run cannot
    begin or continue, click.Abort if it is interrupted.
    """
    folder = request.folder
    with ExitStack() as stack:
        if request.url is not None and not request.only_check:
            stack.callback(_remove_unused, folder)
            use_database(folder, request.url)
        name = request.name or usual_name(request.config.run)
        if request.resume is None:
            check_name(name, "--run")
        store = open_private_record(folder, stack) if has_record(folder) else None
        record = _find_run_to_resume(store, request) if store or request.resume else None
        if record is None:
            run = RunToStart(name, request.config, store, None)
            _check_new_run(run, request)
        else:
            check_kind(folder / record.id, is_region=lead is not None)
            run = RunToStart(record.id, _make_resumed_config(record, request), store, record)
            if _has_ended(run, record):
                if not request.resume_or_new:
                    raise ConfigError("FV1612", f"run {run.name!r} is {record.status}; there is nothing to resume")
                choose_display(request.quiet).line(f"run {run.name} is {record.status}: there is nothing to do")
                return
        import_module("coordinator.serving.run").RunProcess(request, run, lead, stack).run()


def _remove_unused(folder: Path) -> None:
    """Remove a folder that holds nothing but the address of its record: its first run was refused."""
    if folder.is_dir() and [path.name for path in folder.iterdir()] == [ADDRESS_FILE]:
        shutil.rmtree(folder)


# --- a new run ------------------------------------------------------------------------------------------


def _check_new_run(run: RunToStart, request: StartRequest) -> None:
    """Check what can be checked without another process. Raises ConfigError."""
    config = run.config.run
    check_trackers(config, request.where)
    webhook_of(config.alerts)
    check_blobs(config.blobs, request.where)
    check_new(run.store, run.name)
    check_start_from(run.store, config)


# --- an earlier run -------------------------------------------------------------------------------------


def _find_run_to_resume(store: Record | None, request: StartRequest) -> RunRecord | None:
    """Return the run to resume: that of --resume, or with --resume-or-new that of --run if it exists; else None.

    Raises ConfigError if --resume names no such run.
    """
    records = store.runs.read_all() if store else []
    if request.resume is None:
        named = request.name if request.resume_or_new else None
        return next((record for record in records if record.id == named), None)
    if request.resume != "newest":
        if store is None:
            raise ConfigError("FV1601", f"no run {request.resume!r}: there is no run yet")
        return store.runs.read(request.resume)
    unfinished = [record for record in records if record.status not in (*ENDED, "queued")]
    if not unfinished:
        raise ConfigError("FV1612", "no run to resume: every run here is finished, or there is none")
    return unfinished[0]


def _has_ended(run: RunToStart, record: RunRecord) -> bool:
    """Return whether a run is cancelled, or finished and not asked for more by its present configuration."""
    if record.status not in ENDED or record.status == "cancelled":
        return record.status in ENDED
    config = run.config.run
    free: dict[str, Any] = {table: getattr(config, table) for table in FREE_TABLES}
    before = make_config(record.config, f"run {record.id}").run
    return config == msgspec.structs.replace(before, **free)


def _make_resumed_config(record: RunRecord, request: StartRequest) -> StartConfig:
    """Make the configuration of a resumed run: as it is recorded, with the changes of the request.

    Raises ConfigError for changes that are not allowed.
    """
    if record.status == "queued":
        raise ConfigError("FV1615", f"run {record.id!r} is queued: `coordinator serve` begins it")
    broker = dict(record.broker)
    if os.environ.get("FEDVIT_BROKER_PASSWORD"):  # it may have been changed
        broker.pop("password", None)
    broker |= with_listen_port(request.values.get("broker", {}), request.where)
    config = resume_config(record.id, record.config, request.values, request.where)
    check_blobs(config.blobs, request.where)
    return StartConfig(config, make_config({"broker": broker}, request.where).broker)
