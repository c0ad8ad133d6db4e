"""What a run is waiting for, since when, until when: a small file beside the run, for `coordinator status`.

Times in it are by the coordinator's own clock, and only shown; nothing is decided by them.
"""

import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.run.display import DeviceLine, View
from coordinator.run.open_round import Missing, OpenRound
from coordinator.run.presence import Presence
from coordinator.run.state import RunState
from coordinator.run.tasks import Task, TaskState
from fedvit.errors import ConfigError
from fedvit.wire.messages import TaskKind

FILE = "status.json"
EVERY_S = 1.0
STALE_S = 10.0
"""A coordinator that lives writes far more often."""


class AtWork(Struct, frozen=True, kw_only=True):
    """A device that is waited for."""

    device: str
    round: int
    kind: TaskKind
    state: str  # of its task (see TaskState), or offline
    done_steps: int
    total_steps: int
    since: str  # ISO 8601, UTC
    until: str  # given up then, if nothing is heard of it
    attempt: int = 1  # how often the device was given the task


class Resting(Struct, frozen=True, kw_only=True):
    """A device that declined, and is asked again later."""

    device: str
    reason: str
    until: str


class Status(Struct, frozen=True, kw_only=True):
    """What a coordinator was doing when it wrote this."""

    at: str
    doing: str
    waiting_for: list[AtWork]
    resting: list[Resting]
    online: int

    def is_stale(self) -> bool:
        """Whether nobody serves the run any more, or its coordinator hangs."""
        return datetime.now(UTC) - datetime.fromisoformat(self.at) > timedelta(seconds=STALE_S)


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
    done, total = (progress.done_steps, progress.total_steps) if progress else (0, 1)
    return DeviceLine(device, said, done, total, progress.loss if progress else None)


def read_status(folder: Path) -> Status:
    """Raises ConfigError when there is none."""
    try:
        status = msgspec.json.decode((folder / FILE).read_bytes(), type=Status)
        dates = [status.at, *(one.until for one in status.resting)]
        for said in dates + [date for one in status.waiting_for for date in (one.since, one.until)]:
            datetime.fromisoformat(said)
    except OSError:
        raise ConfigError(f"no coordinator has served the run in {folder} yet") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read: {error}; nothing else depends on it") from error
    return status


def lines(run: str, recorded: str, status: Status) -> list[str]:
    """For a person; `recorded`: the run's status in the store."""
    first = f"run {run}: {recorded}"
    if recorded in ("running", "waiting"):
        if status.is_stale():
            first += f"; nobody serves it since {_short(status.at)}: coordinator start --resume {run}"
        else:
            first += f"; {status.doing}"
    said = [first]
    if recorded not in ("running", "waiting"):
        return said
    for one in status.waiting_for:
        steps = f" {one.done_steps}/{one.total_steps}" if one.total_steps else ""
        said.append(
            f"  {one.device}: {one.kind} of round {one.round}, {one.state}{steps}, since {_short(one.since)}, "
            f"until {_short(one.until)}"
        )
    said += [
        f"  {one.device}: declined ({one.reason}), asked again after {_short(one.until)}" for one in status.resting
    ]
    return said


def _short(at: str) -> str:
    """The reader's own time of day."""
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
