"""Puts a run into the queue of a service."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from coordinator.config import RunConfig, check_blobs, check_settings, make_config, why_not_asked
from coordinator.record.opening import has_record, open_private_record
from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from coordinator.rounds.service.status import labels_seen, read_service_status
from coordinator.serving.request import usual_name
from coordinator.serving.start import check_new, check_start_from, check_trackers
from fedvit.errors import ConfigError
from fedvit.wire.topics import check_name


class Submission(NamedTuple):
    """A run as the operator asks for it."""

    values: dict[str, Any]  # of the configuration
    where: str  # names their source in errors
    name: str | None = None  # None: date, time and method


class Submitted(NamedTuple):
    """A run that was put into the queue."""

    run: str
    warning: str | None


def submit(folder: Path, asked: Submission) -> Submitted:
    """Check a run and put it into the queue of the folder's service.

    Names, values and the run to start from are checked; the service builds the model when the run begins. Raises
    ConfigError.
    """
    values, where = asked.values, asked.where
    if "broker" in values:
        raise ConfigError(
            "FV1023", f"{where}: [broker] is for `coordinator start` and `serve`; this run uses its service's broker"
        )
    config = make_config(values, where).run
    check_settings(config, where)
    check_trackers(config, where)
    check_blobs(config.blobs, where)
    run = check_name(asked.name or usual_name(config), "--run")
    with ExitStack() as stack:
        known = open_private_record(folder, stack) if has_record(folder) else None
        check_new(known, run)
        _check_earlier_run(config, known)
        warning = _find_warning(config, folder)
        recorded = msgspec.to_builtins(config)
        if "federation" not in values:  # the service's federation is used
            del recorded["federation"]
        open_private_record(folder, stack).runs.submit(run, recorded)
    return Submitted(run, warning)


def _check_earlier_run(config: RunConfig, store: Record | None) -> None:
    """Raise ConfigError if the run that this one starts from does not exist, or has ended without a round."""
    if config.start_from is None:
        return
    if store is None or store.runs.read(config.start_from).status in ENDED:
        check_start_from(store, config)


def _find_warning(config: RunConfig, folder: Path) -> str | None:
    """Return a warning if no known device has the labels of the run."""
    status = read_service_status(folder)
    fits = status and any(why_not_asked(config.devices_where, member.labels) is None for member in status.members)
    if status is None or not config.devices_where or fits:
        return None
    seen = ", ".join(labels_seen(status)) or "none"
    return (
        f"devices_where = {config.devices_where!r}: no device that the service has seen has these labels; existing "
        f"labels: {seen}. The run waits for such devices"
    )
