"""The status of a run and the devices that take part: two small files in the run's folder, for
`coordinator status` and the dashboard.

Times are by the coordinator's clock, for display only.
"""

from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct, field

from coordinator.record.liveness import STATUS_FILE, is_stale
from fedvit.errors import ConfigError
from fedvit.wire.messages import TaskKind

MEMBERS = "members.json"
SEEN_EVERY_S = 5.0
"""Time between two writes of when devices were last seen."""


class AtWork(Struct, frozen=True, kw_only=True):
    """A device that is awaited."""

    device: str
    round: int
    kind: TaskKind
    state: str  # of its task (see TaskState), or offline
    done_steps: int
    total_steps: int
    since: str  # ISO 8601, UTC
    until: str  # its task is given up then, unless it makes progress
    attempt: int = 1  # number of the current attempt


class BackingOff(Struct, frozen=True, kw_only=True):
    """A device that declined or crashed, and is asked again later."""

    device: str
    reason: str
    until: str


class LiveStatus(Struct, frozen=True, kw_only=True):
    """The work of a coordinator when it wrote this file."""

    at: str
    doing: str
    waiting_for: list[AtWork]
    backing_off: list[BackingOff] = field(name="resting")
    online: int
    round: int = 0  # whose training was open last
    devices_s: float = 0.0  # time in which coordinators waited for the results of that training
    set_aside: dict[str, str] = {}  # devices that are not asked -> what their policy does not allow, in words
    store_trouble: str = ""  # why the object store cannot be used; empty if its last use succeeded

    def is_stale(self) -> bool:
        """Return whether the run is no longer served, or its coordinator hangs."""
        return is_stale(self.at)


class Member(Struct, frozen=True, kw_only=True):
    """A device that was admitted to the run, as its last hello described it."""

    device: str
    online: bool  # when the file was written
    since: str  # ISO 8601, UTC: when it arrived, or left
    seen: str  # ISO 8601, UTC: when the coordinator had a connection to it last, to SEEN_EVERY_S
    board: str | None
    host: str
    machine: str
    cores: int
    ram_bytes: int | None
    memory_budget_bytes: int | None  # its own
    software: str
    labels: dict[str, str]


def read_members(folder: Path) -> list[Member]:
    """The devices of a run; none if there is no readable file, on which nothing depends."""
    try:
        return msgspec.json.decode((folder / MEMBERS).read_bytes(), type=list[Member])
    except (OSError, msgspec.MsgspecError):
        return []


def read_status(folder: Path) -> LiveStatus:
    """Raises ConfigError when there is none."""
    try:
        status = msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=LiveStatus)
        dates = [status.at, *(one.until for one in status.backing_off)]
        for text in dates + [date for one in status.waiting_for for date in (one.since, one.until)]:
            datetime.fromisoformat(text)
    except OSError:
        raise ConfigError("FV1601", f"no coordinator has served the run in {folder} yet") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(
            "FV1624", f"{folder / STATUS_FILE} cannot be read: {error}; nothing else depends on this file"
        ) from error
    return status


def lines(run: str, now: str, status: LiveStatus, resume: str) -> list[str]:
    """Return the status as text; `now`: the run's current status, `resume`: the command that resumes it."""
    if now == "interrupted":
        return [f"run {run}: {now}; not served since {_short(status.at)}: {resume}"]
    if now not in ("running", "waiting"):
        return [f"run {run}: {now}"]
    shown = [f"run {run}: {now}; {status.doing}"]
    for one in status.waiting_for:
        steps = f" {one.done_steps}/{one.total_steps}" if one.total_steps else ""
        shown.append(
            f"  {one.device}: {one.kind} of round {one.round}, {one.state}{steps}, since {_short(one.since)}, "
            f"until {_short(one.until)}"
        )
    shown += [
        f"  {one.device}: declined ({one.reason}), asked again after {_short(one.until)}" for one in status.backing_off
    ]
    return shown


def _short(at: str) -> str:
    """The time of day in the reader's time zone."""
    return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
