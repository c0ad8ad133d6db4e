"""Liveness: whether a coordinator serves a run now, by the small file that it writes every second."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.tables import RunRecord, RunStatus

STATUS_FILE = "status.json"
"""In a run's folder."""
STALE_S = 10.0
"""A coordinator writes its file far more often."""


class _Written(Struct):
    at: str  # ISO 8601, UTC


def is_stale(at: str) -> bool:
    """Return whether a coordinator that writes a file all the time has stopped, by the file's date (ISO 8601, UTC).

    A date in the future is from before the clock was set back.
    """
    return abs(datetime.now(UTC) - datetime.fromisoformat(at)) > timedelta(seconds=STALE_S)


def current_status(store: Record, record: RunRecord) -> RunStatus:
    """Return a run's status now: interrupted if its coordinator was killed before it could write that to the record."""
    if record.status not in ("waiting", "running") or store.database.folder is None:
        return record.status
    if not _has_stopped(store.database.folder / record.id):
        return record.status
    if record.submitted_at and any(host.leads for host in store.database.services()):  # maybe on another host
        return record.status
    return "interrupted"


def _has_stopped(home: Path) -> bool:
    """Return whether a coordinator served the run of a folder and does so no longer."""
    try:
        return is_stale(msgspec.json.decode((home / STATUS_FILE).read_bytes(), type=_Written).at)
    except (OSError, ValueError):  # it has not begun to serve the run, or the file is damaged
        return False
