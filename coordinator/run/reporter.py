"""What a run is waiting for, as it is written down for `coordinator status` and shown on the console."""

import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from coordinator.run.display import DeviceLine, View
from coordinator.run.open_round import Missing, OpenRound
from coordinator.run.presence import Presence
from coordinator.run.state import RunState
from coordinator.run.status import FILE, AtWork, Resting, Status
from coordinator.run.tasks import Task, TaskState

EVERY_S = 1.0


class Reporter:
    """Writes the file about once a second."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._written_at = -EVERY_S

    def tick(self, state: RunState) -> None:
        now = time.monotonic()
        if now - self._written_at < EVERY_S:
            return
        self._written_at = now
        clock = datetime.now(UTC)

        def said(at: float) -> str:
            return (clock + timedelta(seconds=at - now)).isoformat(timespec="seconds")

        presence = state.presence
        at_work = [
            AtWork(
                device=task.device,
                round=task.round,
                kind=task.kind,
                state=_state_of(task, presence),
                attempt=task.attempt,
                done_steps=task.progress.done_steps if task.progress else 0,
                total_steps=task.progress.total_steps if task.progress else 0,
                since=said(task.deadline.began),
                until=said(task.deadline.at),
            )
            for task in state.tasks
        ]
        resting = [
            Resting(device=device.name, reason=device.rests_because, until=said(device.rests_until))
            for device in presence.resting()
        ]
        online = presence.count_online()
        status = Status(at=said(now), doing=state.doing, waiting_for=at_work, resting=resting, online=online)
        # renamed, so that a reader sees the old or the new; not synced, since nobody needs it after a power cut
        fresh = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # a run does not end because nobody can read what it waits for
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
            fresh.replace(self._path)


def _state_of(task: Task, presence: Presence) -> str:
    uploads = task.state in (TaskState.UPLOADING, TaskState.CHECKED)
    return "offline" if not uploads and not presence.is_online(task.device) else task.state


def view(state: RunState) -> View:
    """What is going on now, and what each device of the open round does."""
    opened = state.opened
    if opened is None:
        return View(state.doing)
    now, missing = time.monotonic(), opened.waiting_for()
    known = [task for device in missing if (task := state.tasks.of(device))]
    until_s = max((task.deadline.at - opened.opened_at for task in known), default=0.0)
    tail = f", waiting for {len(missing)} since {now - opened.opened_at:.0f} s (until {until_s:.0f} s)"
    lines = [_line(device, opened, state) for device in sorted(opened.cohort)]
    return View(f"{state.doing}{tail if missing else ''}", lines)


def _line(device: str, opened: OpenRound, state: RunState) -> DeviceLine:
    task = state.tasks.of(device)
    progress = task.progress if task else None
    if device in opened.accepted:
        said = "done"
    elif why := opened.failed.get(device):
        said = "declined" if why is Missing.DECLINED else "failed"
    elif task:
        said = _state_of(task, state.presence)
    else:
        said = "waiting" if state.presence.is_online(device) else "offline"
    said = opened.kind if said == TaskState.WORKING else said
    done, total = (progress.done_steps, progress.total_steps) if progress else (int(said == "done"), 1)
    return DeviceLine(device, said, done, total, progress.loss if progress else None)
