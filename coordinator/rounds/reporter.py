"""The status of a run and its devices: written to files for other programs, and shown on the console."""

import contextlib
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from coordinator.record.liveness import STALE_S, STATUS_FILE
from coordinator.rounds.display import DeviceLine, View
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.presence import Presence, PresentDevice
from coordinator.rounds.state import RunState
from coordinator.rounds.status import (
    MEMBERS,
    SEEN_EVERY_S,
    AtWork,
    BackingOff,
    LiveStatus,
    Member,
    read_members,
    read_status,
)
from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.errors import ConfigError

EVERY_S = 1.0
SHARE = 0.02
"""Most of this process's time that writing may take: with thousands of devices the file is written more rarely."""
SLOWEST_S = STALE_S / 2


class Reporter:
    """Writes the status about once a second, or at most every SLOWEST_S, and the devices after arrivals and departures
    and every SEEN_EVERY_S.

    It also measures the time of a round's training, since a coordinator that resumes the round finds it in the status.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATUS_FILE
        self._due = 0.0
        self._members_path = folder / MEMBERS
        self._members = {  # of earlier processes; each announces itself to this one again
            member.device: msgspec.structs.replace(
                member, online=False, since=member.seen if member.online else member.since
            )
            for member in read_members(folder)
        }
        self._changes = 0  # of presence, that the file has
        self._round, self._devices_s = 0, 0.0
        self._members_due = 0.0
        with contextlib.suppress(ConfigError):  # no earlier process, or no readable file: the time begins now
            before = read_status(folder)
            self._round, self._devices_s = before.round, before.devices_s
        self._ticked_at: float | None = None  # monotonic; while a training is open

    def devices_s(self, number: int) -> float:
        """Return the time in which coordinators have waited for the training of a round, by earlier processes and
        before pauses; the time between them does not count."""
        return self._devices_s if number == self._round else 0.0

    def close(self, state: RunState, store_trouble: str = "") -> None:
        """Write everything a last time."""
        self._due = self._members_due = 0.0
        self.tick(state, store_trouble)

    def _measure(self, opened: OpenRound | None, now: float) -> None:
        """Add the time since the last tick to that of the open training."""
        if opened is None or opened.kind != "train":
            self._ticked_at = None
            return
        if opened.number != self._round:
            self._round, self._devices_s = opened.number, 0.0
        self._devices_s += now - (opened.opened_at if self._ticked_at is None else self._ticked_at)
        self._ticked_at = now

    def tick(self, state: RunState, store_trouble: str = "") -> None:
        """Write what is due. `store_trouble`: why the object store cannot be used."""
        now = time.monotonic()
        if now < self._due:
            return
        self._measure(state.opened, now)
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
            BackingOff(device=device.name, reason=device.backoff.reason, until=iso(device.backoff.until))
            for device in presence.backing_off()
        ]
        online = presence.count_online()
        status = LiveStatus(
            at=iso(now),
            doing=state.doing,
            waiting_for=at_work,
            backing_off=backing_off,
            online=online,
            round=self._round,
            devices_s=self._devices_s,
            set_aside=dict(state.not_allowing),
            store_trouble=store_trouble,
        )
        _write(self._path, msgspec.json.format(msgspec.json.encode(status)))
        if presence.changes != self._changes or (online and now >= self._members_due):
            self._changes, self._members_due = presence.changes, now + SEEN_EVERY_S
            self._members |= {
                device.name: self._member(device, presence.is_online(device.name), iso) for device in presence
            }
            _write(self._members_path, msgspec.json.encode(list(self._members.values())))
        done = time.monotonic()
        self._due = done + min(SLOWEST_S, max(EVERY_S, (done - now) / SHARE))

    def _member(self, device: PresentDevice, online: bool, iso: Callable[[float], str]) -> Member:
        before, profile = self._members.get(device.name), device.hello.profile
        seen = iso(time.monotonic() if device.left_at is None else device.left_at)
        is_unchanged = before is not None and before.online == online
        return Member(
            device=device.name,
            online=online,
            since=before.since if before and is_unchanged else seen,
            seen=before.seen if before and is_unchanged and not online else seen,
            board=profile.board,
            host=profile.host,
            machine=profile.machine,
            cores=profile.cores,
            ram_bytes=profile.ram_bytes,
            memory_budget_bytes=profile.budget.memory_bytes,
            software=device.hello.software,
            labels=device.hello.labels,
        )


def _write(file: Path, content: bytes) -> None:
    """Renamed, so that a reader sees the old or the new file; not synced, since it is not needed after a power cut."""
    fresh = file.with_suffix(".new")
    with contextlib.suppress(OSError):  # the run does not depend on this file
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(content)
        fresh.replace(file)


def _state_of(task: DeviceTask, presence: Presence) -> str:
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
        status = why.value
    elif task:
        status = _state_of(task, state.presence)
    else:
        status = "waiting" if state.presence.is_online(device) else "offline"
    status = opened.kind if status == TaskState.WORKING else status
    done, total = (progress.done_steps, progress.total_steps) if progress else (int(status == "done"), 1)
    return DeviceLine(device, status, done, total, progress.loss if progress else None)
