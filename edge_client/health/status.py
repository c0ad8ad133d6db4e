"""The status of a device: a small file that the agent writes, and `edge-client status` reads."""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from edge_client.health.history import AgentState, LastError, LastTask
from edge_client.link.device_link import DeviceIdentity
from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write
from fedvit.quantities import format_bytes, format_count, format_seconds
from fedvit.terminal import escape_line

log = logging.getLogger(__name__)

STATUS_VERSION = 1
LEAST_INTERVAL_S = 1.0
"""Between two writes of the file."""
MOST_EXAMPLES = 5
"""Files that are named for each reason."""


class ClassImages(Struct, frozen=True):
    """Images of one class."""

    train: int
    test: int


class Unusable(Struct, frozen=True):
    """Files that are not used for one reason."""

    count: int
    examples: tuple[str, ...]


class Doing(Struct, frozen=True, kw_only=True):
    """The part of a status that is worth a write when it changes."""

    state: str
    run: str | None = None
    round: int | None = None
    done_steps: int | None = None
    total_steps: int | None = None
    last: LastTask | None = None
    last_error: LastError | None = None
    classes: dict[str, ClassImages]
    unusable: dict[str, Unusable]  # by reason


class Status(Struct, frozen=True, kw_only=True):
    """A device's status. Memory is resident memory of the process and of the one that runs graphs."""

    v: int = STATUS_VERSION
    device: str
    federation: str
    broker: str
    software: str
    process: int
    started_s: float
    written_s: float
    doing: Doing
    rss_bytes: int
    peak_rss_bytes: int | None  # of the newest task
    memory_budget_bytes: int | None


class StatusFile:
    """Writes the status of one agent, at most once a second, and only when something has changed."""

    def __init__(self, path: Path, identity: DeviceIdentity, *, broker: str) -> None:
        self.path = path
        self._identity = identity
        self._broker = broker
        self._started_s = time.time()
        self._next = 0.0  # monotonic
        self._written: Doing | None = None
        self._counted: _Counted | None = None
        self._failed = False  # the last write

    def tick(self, state: AgentState) -> None:
        """Call it a few times a second."""
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LEAST_INTERVAL_S
        if (doing := self._describe(state, state.activity)) != self._written:
            self._write(state, doing)

    def close(self, state: AgentState) -> None:
        """Write the file for the last time."""
        self._write(state, self._describe(state, "stopped"))

    def _write(self, state: AgentState, doing: Doing) -> None:
        try:
            status = Status(
                device=self._identity.device,
                federation=self._identity.federation,
                broker=self._broker,
                software=self._identity.software,
                process=os.getpid(),
                started_s=self._started_s,
                written_s=time.time(),
                doing=doing,
                rss_bytes=state.memory.resident_bytes(),
                peak_rss_bytes=state.peak_rss_bytes,
                memory_budget_bytes=self._identity.profile.budget.memory_bytes,
            )
            atomic_write(self.path, msgspec.json.encode(status), durable=False)
        except (StorageFailed, OSError) as error:  # the device continues without a status
            if not self._failed:
                log.warning("status not written", extra={"reason": str(error)})
            self._failed = True
        else:
            self._written, self._failed = doing, False

    def _describe(self, state: AgentState, activity: str) -> Doing:
        task, progress = state.task, state.progress
        images = self._count(state.data)
        if (
            task is None
            or progress is None
            or (task.run, task.round, task.kind) != (progress.run, progress.round, progress.kind)
        ):
            progress = None
        return Doing(
            state=activity,
            run=task.run if task else None,
            round=task.round if task else None,
            done_steps=progress.done_steps if progress else None,
            total_steps=progress.total_steps if progress else None,
            last=state.last_task,
            last_error=state.last_error,
            classes=images.classes,
            unusable=images.unusable,
        )

    def _count(self, data: DeviceData) -> "_Counted":
        """The images of the data, counted again when they have changed or another one could not be decoded."""
        failed = len(data.train.failed) + len(data.test.failed)
        if self._counted is None or self._counted.data is not data or self._counted.failed != failed:
            both = [part.count_classes(len(data.classes)).tolist() for part in (data.train, data.test)]
            counts = zip(data.classes, *both, strict=True)
            classes = {name: ClassImages(train, test) for name, train, test in counts}
            self._counted = _Counted(data, failed, classes, unusable(data))
        return self._counted


class _Counted(NamedTuple):
    data: DeviceData
    failed: int
    classes: dict[str, ClassImages]
    unusable: dict[str, Unusable]


def unusable(data: DeviceData) -> dict[str, Unusable]:
    """Files that are not used, by reason; what stands behind a colon differs from file to file."""
    files = defaultdict(list)
    for path, reason in data.problems():
        files[reason.partition(":")[0]].append(str(path.relative_to(data.folder)))
    return {reason: Unusable(len(names), tuple(names[:MOST_EXAMPLES])) for reason, names in sorted(files.items())}


def read_status(path: Path) -> Status:
    """Raises ConfigError when no device has written one, or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except FileNotFoundError:
        raise ConfigError(
            "FV1412", f"there is no {path}: no device has run with this state; --state names another"
        ) from None
    except OSError as error:
        raise ConfigError("FV1702", f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of msgspec, or no UTF-8
        raise ConfigError(
            "FV1412", f"{path} cannot be read ({error}): the device writes it again at its next start"
        ) from error


def lines(status: Status, *, running: bool, more: Iterable[tuple[str, str]] = ()) -> str:
    """The status as plain text, with `more` rows."""
    rows = [*_rows(status, running), *more]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {escape_line(value)}" for name, value in rows)


def _rows(status: Status, running: bool) -> Iterator[tuple[str, str]]:
    doing = status.doing
    yield "device", f"{status.device}, fedvit {status.software}"
    yield "state", _state(doing) if running else f"not running, since {_when(status.written_s)} or later"
    yield "coordinator", f"federation {status.federation} at {status.broker}"
    if doing.last:
        last = doing.last
        details = [format_count(last.samples, "image")] if last.samples is not None else []
        details += [f"{name} {value:.4g}" for name, value in last.metrics.items()]
        what = f"round {last.round} of {last.run}: {last.kind} {last.outcome}"
        yield "last task", ", ".join([what, *details, _when(last.ended_s)])
    else:
        yield "last task", "none since the start"
    train = sum(count.train for count in doing.classes.values())
    test = sum(count.test for count in doing.classes.values())
    yield "images", f"{train} for training, {test} for testing"
    for name, count in doing.classes.items():
        yield "", f"{name}: {count.train} + {count.test}"
    for reason, files in doing.unusable.items():
        more = ", ..." if files.count > len(files.examples) else ""
        yield "not used", f"{files.count} {reason}: {', '.join(files.examples)}{more}"
    peak = "" if status.peak_rss_bytes is None else f", {format_bytes(status.peak_rss_bytes)} at most in the last task"
    budget = "no budget" if status.memory_budget_bytes is None else f"budget {format_bytes(status.memory_budget_bytes)}"
    yield "memory", f"{format_bytes(status.rss_bytes)}{peak}, {budget}"
    error = doing.last_error
    yield "last error", f"{error.what} ({_when(error.at_s)})" if error else "none since the start"
    yield "written", _when(status.written_s)


def _state(doing: Doing) -> str:
    task = f", round {doing.round} of {doing.run}" if doing.run else ""
    steps = f", step {doing.done_steps} of {doing.total_steps}" if doing.total_steps else ""
    return f"{doing.state}{task}{steps}"


def _when(seconds: float) -> str:
    age_s = time.time() - seconds
    ago = f" ({format_seconds(age_s)} ago)" if age_s >= 1 else ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + ago
