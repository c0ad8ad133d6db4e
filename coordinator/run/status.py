"""What a run is waiting for, since when, until when: a small file beside the run, for `coordinator status`.

Times in it are by the coordinator's own clock, and only shown; nothing is decided by them.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from msgspec import Struct

from fedvit.errors import ConfigError
from fedvit.wire.messages import TaskKind

FILE = "status.json"
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
