"""Puts a run into the queue of a service."""

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from coordinator.config import RunConfig, check_blobs, check_settings, make_config, why_not_asked
from coordinator.operations.documents import SubmittedRun
from coordinator.record.opening import has_record, open_private_record
from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from coordinator.rounds.service.status import labels_seen, read_service_status
from coordinator.serving.checks import check_new, check_start_from, check_trackers
from coordinator.serving.request import usual_name
from fedvit.errors import ConfigError
from fedvit.quantities import parse_seconds
from fedvit.wire.topics import check_name

HIGHEST_PRIORITY = 1000


class Submission(NamedTuple):
    """A run as the operator asks for it."""

    values: dict[str, Any]  # of the configuration
    where: str  # names their source in errors
    name: str | None = None  # None: date, time and method
    priority: int = 0
    starts_at: str | None = None  # ISO 8601, UTC


def submit(folder: Path, asked: Submission, *, places: bool = True) -> SubmittedRun:
    """Check a run and put it into the queue of the folder's service.

    Names, values and the run to start from are checked; the service builds the model when the run begins. Without
    `places` the configuration may name no file or address that this machine would use, and remove no runs. Raises
    ConfigError.
    """
    values, where = asked.values, asked.where
    if "broker" in values:
        raise ConfigError(
            "FV1023", f"{where}: [broker] is for `coordinator start` and `serve`; this run uses its service's broker"
        )
    config = make_config(values, where).run
    if not places and (key := _find_reserved(config)):
        raise ConfigError(
            "FV1812", f"{where}: {key} names a place of the server, or removes runs: that needs a token of an admin"
        )
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
        store = known or open_private_record(folder, stack)
        with store.database.together():
            store.runs.submit(run, recorded, priority=asked.priority, starts_at=asked.starts_at)
            store.audit.add("submit", run, f"{config.method} on {config.model}, {config.rounds} rounds")
    return SubmittedRun(run=run, status="queued", warning=warning)


def parse_time(text: str) -> str:
    """Read a time from now on, or a date and time (ISO 8601, local unless it names a zone), as the record writes it.

    Raises ConfigError.

    >>> parse_time("2026-12-24T22:00:00+01:00")
    '2026-12-24T21:00:00.000+00:00'
    """
    try:
        if text[:1] == "+":
            at = datetime.now(UTC) + timedelta(seconds=parse_seconds(text[1:]))
        else:
            at = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError, ConfigError):
        raise ConfigError(
            "FV1818",
            f"time {text!r} must be a date and time, such as 2026-12-24T22:00, or one from now on, such as +8h",
        ) from None
    return at.isoformat(timespec="milliseconds")


def _find_reserved(config: RunConfig) -> str | None:
    """Return the key that names a file or an address of this machine, or removes runs; None if there is none."""
    keys = {
        "keep_runs": config.keep_runs is not None,
        "pretrained": isinstance(config.pretrained, str),
        "server_data": config.server_data is not None,
        "blobs.url": urlsplit(config.blobs.url or "").scheme == "file",
        "blobs.endpoint": config.blobs.endpoint is not None,
        "trackers.mlflow_uri": config.trackers.mlflow_uri is not None,
        "alerts.webhook": config.alerts.webhook is not None,
    }
    return next((key for key, is_set in keys.items() if is_set), None)


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
