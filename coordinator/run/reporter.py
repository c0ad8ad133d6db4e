"""What a run is waiting for: written to a file for `coordinator status`, and shown on the console."""

import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from coordinator.run.display import DeviceLine, View
from coordinator.run.open_round import Missing, OpenRound
from coordinator.run.presence import Presence
from coordinator.run.state import RunState
from coordinator.run.status import FILE, STALE_S, AtWork, BackingOff, Status
from coordinator.run.tasks import Task, TaskState

EVERY_S = 1.0
SHARE = 0.02
"""Most of this process's time that writing may take: with thousands of devices the file is written more rarely."""
SLOWEST_S = STALE_S / 2


class Reporter:
    """Writes the file about once a second, or at most every SLOWEST_S."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._due = 0.0

    def tick(self, state: RunState) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        clock = datetime.now(UTC)

        def iso(at: float) -> str:
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
                since=iso(task.deadline.began),
                until=iso(task.deadline.at),
            )
            for task in state.tasks
        ]
        backing_off = [
            BackingOff(device=device.name, reason=device.backoff_reason, until=iso(device.backoff_until))
            for device in presence.backing_off()
        ]
        online = presence.count_online()
        status = Status(at=iso(now), doing=state.doing, waiting_for=at_work, backing_off=backing_off, online=online)
        # renamed, so that a reader sees the old or the new file; not synced, since it is not needed after a power cut
        fresh = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the run does not depend on this file
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
            fresh.replace(self._path)
        done = time.monotonic()
        self._due = done + min(SLOWEST_S, max(EVERY_S, (done - now) / SHARE))


def _state_of(task: Task, presence: Presence) -> str:
    uploads = task.state in (TaskState.UPLOADING, TaskState.CHECKED)
    return "offline" if not uploads and not presence.is_online(task.device) else task.state


def view(state: RunState) -> View:
    """The current step, and what each device of the open round does."""
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
        status = "done"
    elif why := opened.failed.get(device):
        status = "declined" if why is Missing.DECLINED else "failed"
    elif task:
        status = _state_of(task, state.presence)
    else:
        status = "waiting" if state.presence.is_online(device) else "offline"
    status = opened.kind if status == TaskState.WORKING else status
    done, total = (progress.done_steps, progress.total_steps) if progress else (int(status == "done"), 1)
    return DeviceLine(device, status, done, total, progress.loss if progress else None)
