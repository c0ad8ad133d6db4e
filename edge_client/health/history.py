"""The recent history of a device and its state at a moment, for people and for metrics."""

import time
from typing import NamedTuple

from msgspec import Struct

from edge_client.health.memory import OwnMemory
from fedvit.data.folder import DeviceData
from fedvit.wire.messages import Progress, Result, Task, TaskKind


class LastTask(Struct, frozen=True, kw_only=True):
    """The newest task that ended on this device."""

    run: str
    round: int
    kind: TaskKind
    outcome: str  # "done", "failed", or "declined" with the reason
    samples: int | None = None
    metrics: dict[str, float] = {}
    ended_s: float  # seconds since 1970, as all times here


class LastError(Struct, frozen=True, kw_only=True):
    what: str
    at_s: float


class History:
    """The newest task, error and progress since the start."""

    def __init__(self) -> None:
        self.task: LastTask | None = None
        self.error: LastError | None = None
        self.failure: Exception | None = None  # of the newest task that ended; None: it did not fail
        self.peak_rss_bytes: int | None = None  # of the newest task that was done

    def note_error(self, what: str) -> None:
        self.error = LastError(what=what, at_s=time.time())

    def note_end(
        self, task: Task, outcome: str, result: Result | None = None, failure: Exception | None = None
    ) -> None:
        self.failure = failure
        self.task = LastTask(
            run=task.run,
            round=task.round,
            kind=task.kind,
            outcome=outcome,
            samples=result.samples if result else None,
            metrics=result.metrics if result else {},
            ended_s=time.time(),
        )
        if result:
            self.peak_rss_bytes = result.use.peak_rss_bytes


class AgentState(NamedTuple):
    """The state of an agent at a moment."""

    connected: bool  # to the broker
    joined: bool  # a coordinator has answered its hello
    activity: str  # for people
    task: Task | None  # under way
    progress: Progress | None  # the newest, of any task
    last_task: LastTask | None
    last_error: LastError | None
    memory: OwnMemory  # of the device's processes
    peak_rss_bytes: int | None
    waiting: int  # answers to tasks that are not acknowledged yet
    answers: dict[tuple[TaskKind, str], int]  # number of answers since the start, by kind of task and of message
    data: DeviceData
