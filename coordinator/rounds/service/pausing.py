"""Requests to pause a run, in the record: a paused run opens no new round."""

from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from fedvit.errors import ConfigError


def pause(store: Record, run: str) -> str:
    """Pause a run before its next round. Returns what happens. Raises ConfigError if there is no such run, or if it has
    ended or is paused already."""
    record = store.runs.read(run)
    if record.status in ENDED:
        raise ConfigError("FV1612", f"run {run!r} is {record.status}: it cannot be paused")
    if record.paused_at is not None:
        raise ConfigError("FV1611", f"run {run!r} is paused already, since {record.paused_at}")
    with store.database.together():
        store.runs.pause(run, paused=True)
        store.audit.add("pause", run)
    return "opens no new round; its open round is finished first"


def unpause(store: Record, run: str) -> str:
    """Let a paused run open rounds again. Returns what happens. Raises ConfigError if it is not paused."""
    if store.runs.read(run).paused_at is None:
        raise ConfigError("FV1611", f"run {run!r} is not paused")
    with store.database.together():
        store.runs.pause(run, paused=False)
        store.audit.add("unpause", run)
    return "opens rounds again"
