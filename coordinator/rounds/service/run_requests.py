"""Requests of an operator about a run, in the record: cancel, pause, unpause or retry it, release a device."""

from pathlib import Path
from typing import Literal

from coordinator.record.record import Record
from coordinator.record.retention import is_served
from coordinator.record.tables import ENDED
from fedvit.errors import ConfigError
from fedvit.hints import command

RunAct = Literal["cancel", "pause", "unpause", "retry"]


def change_run(store: Record, folder: Path, run: str, act: RunAct) -> str:
    """Cancel, pause, unpause or retry a run; `folder` is that of all runs. Returns what happens.

    Raises ConfigError if there is no such run, or if its state does not allow this.
    """
    if act in ("cancel", "retry"):
        return {"cancel": cancel, "retry": retry}[act](store, folder, run)
    return {"pause": pause, "unpause": unpause}[act](store, run)


def cancel(store: Record, folder: Path, run: str) -> str:
    """Cancel a run: at once if it is queued or was killed, within seconds if it is being served. `folder` is that of
    all runs. Returns what happens. Raises ConfigError if there is no such run, or if it has ended."""
    record = store.runs.read(run)
    if record.status in ("finished", "failed", "cancelled"):
        raise ConfigError("FV1612", f"run {run!r} is {record.status} already")
    with store.database.together():
        store.runs.cancel(run)
        store.audit.add("cancel", run)
    if not is_served(folder / run) and store.runs.read(run).status != "cancelled":  # its process was killed
        store.runs.update(run, status="cancelled")
    return "cancelled" if store.runs.read(run).status == "cancelled" else "its coordinator ends it now"


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


def retry(store: Record, folder: Path, run: str) -> str:
    """Let a service serve a failed run again: from its newest round, or from the queue if it has none.

    Returns what happens. Raises ConfigError if there is no such run, it has not failed, or no service served it.
    """
    record = store.runs.read(run)
    if record.status != "failed":
        raise ConfigError("FV1612", f"run {run!r} is {record.status}: only a failed run can be tried again")
    if record.submitted_at is None:
        resume = command("coordinator", "start", "--resume", run, runs=folder)
        raise ConfigError("FV1615", f"run {run!r} was not submitted to a service; continue it with: {resume}")
    last = store.rounds.find_last(run)
    with store.database.together():
        if not store.runs.retry(run, has_begun=last > 0):
            raise ConfigError("FV1612", f"run {run!r} has just been changed by another process")
        store.audit.add("retry", run, record.reason or "")
    return f"its service resumes it from round {last}" if last else "queued again"


def release(store: Record, run: str, device: str) -> None:
    """End a device's quarantines and reset its strikes. Raises ConfigError if it has neither."""
    with store.database.together():
        if not store.strikes.release(run, device):
            raise ConfigError("FV1622", f"device {device!r} has neither strikes nor a quarantine in run {run!r}")
        store.audit.add("release", device, f"run {run}")
