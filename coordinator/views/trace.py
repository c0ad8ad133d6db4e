"""The tasks of one round on one time line: from the record, the coordinator's log and, where they are given, devices'
logs. Lines of logs count if they are in JSON.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from coordinator.record.record import Record
from coordinator.record.tasks import TaskHistory
from fedvit.errors import ConfigError
from fedvit.files import name_failure
from fedvit.logs import OLD_FILES
from fedvit.resources import ResourceUse
from fedvit.task_names import KINDS, TaskName

Source = Literal["record", "coordinator", "device"]

ASKED, RECEIVED, ACCEPTED, REFUSED, ENDED = (
    "task asked", "result received", "result accepted", "refused", "task ended"
)  # fmt: skip
"""Messages of the coordinator's log; the same events of the record have these names, too."""
_TIMES = {"fetching_at": "blobs requested", "working_at": "first step reported", "arrived_at": RECEIVED,
          "left_at": "device left", "returned_at": "device returned"}  # fmt: skip
_OF_EVERY_LINE = {"date", "level", "message", "run", "round", "device", "kind", "attempt", "task"}


class TraceStep(Struct, frozen=True, kw_only=True):
    """One event."""

    at: str  # ISO 8601, UTC, by the clock of its source
    event: str
    source: Source
    seconds: float | None = None  # since the step before; None: it is the first
    details: dict[str, Any] = {}


class TaskTrace(Struct, frozen=True, kw_only=True):
    """One attempt at a task. What is not known is None."""

    task: str
    device: str
    kind: str
    attempt: int  # 0: not known
    outcome: str | None  # an end of `TaskState`
    reason: str | None  # why it has no result that counts
    asked_at: str | None
    fetch_s: float | None  # on the device, from the task's receipt until its blobs were there
    work_s: float | None  # on the device, without transfers
    accept_s: float | None  # from the arrival of the result until it was stored, with its upload
    total_s: float | None  # at the coordinator, from the question to the end
    steps: list[TraceStep]


class RoundTrace(Struct, frozen=True, kw_only=True):
    """One round, and the tasks in it."""

    run: str
    round: int
    opened_at: str
    closed_at: str | None  # of its training; None: it is open
    steps: list[TraceStep]  # of the whole round
    tasks: list[TaskTrace]
    has_log: bool  # the coordinator's log has lines in JSON about the round


def read_trace(
    store: Record, folder: Path, run: str, number: int, *, device: str | None = None, logs: Iterable[Path] = ()
) -> RoundTrace:
    """Read a round, or the tasks of one device in it; `folder` is that of the run, `logs` are those of devices.

    Raises ConfigError if there is no such run or round, or a log cannot be read.
    """
    store.runs.read(run)
    if (opened := store.rounds.read(run, number)) is None:
        raise ConfigError("FV1623", f"run {run!r} has no round {number}")
    trace = _Trace(run, number, device)
    names = [f"coordinator.log.{age}" for age in range(OLD_FILES, 0, -1)] + ["coordinator.log"]
    for file in (folder / name for name in names if (folder / name).exists()):
        trace.add_log(file, "coordinator")
    has_log = bool(trace.steps or trace.round_steps)
    for file in logs:
        trace.add_log(file, "device")
    for history in store.tasks.read_histories(run, [number], device):
        trace.add_history(history)
    received = store.tasks.read_received(run, number, "evaluate")
    for result in store.tasks.read_results(run, number, "evaluate"):
        if device in (None, result.device):
            name = trace.find(TaskName(run, number, result.device, "evaluate"))
            trace.use[name], trace.outcomes[name] = result.use, "accepted"
            trace.add(name, TraceStep(at=received[result.device], event=ACCEPTED, source="record"))
    for refusal in store.devices.read_refusals(run, round_number=number, device=device):
        if refusal.kind in (*KINDS, "declined"):
            kind = refusal.kind if refusal.kind in KINDS else "train"
            name = trace.find(TaskName(run, number, refusal.device, kind))
            trace.reasons[name] = refusal.reason
            trace.add(
                name, TraceStep(at=refusal.at, event=REFUSED, source="record", details={"reason": refusal.reason})
            )
    return RoundTrace(
        run=run,
        round=number,
        opened_at=opened.opened_at,
        closed_at=opened.closed_at,
        steps=_in_order(trace.round_steps),
        tasks=[trace.make_task(name) for name in sorted(trace.steps)],
        has_log=has_log,
    )


class _Trace:
    """The events of one round, by attempt."""

    def __init__(self, run: str, number: int, device: str | None) -> None:
        self.round_steps: list[TraceStep] = []
        self.steps: dict[TaskName, list[TraceStep]] = {}
        self.use: dict[TaskName, ResourceUse] = {}
        self.outcomes: dict[TaskName, str] = {}
        self.reasons: dict[TaskName, str] = {}
        self._run, self._number, self._device = run, number, device

    def find(self, name: TaskName) -> TaskName:
        """Return the newest known attempt for a name without one."""
        if name.attempt:
            return name
        return max((known for known in self.steps if known[:4] == name[:4]), default=name)

    def add(self, name: TaskName, step: TraceStep) -> None:
        """Add a step, unless the coordinator's log has the same one."""
        steps = self.steps.setdefault(name, [])
        if step.source != "record" or not any((step.event, "coordinator") == (one.event, one.source) for one in steps):
            steps.append(step)

    def add_history(self, history: TaskHistory) -> None:
        """Add what the record has of a training task."""
        name = TaskName(self._run, self._number, history.device, "train", history.attempt)
        self.add(name, TraceStep(at=history.asked_at, event=ASKED, source="record"))
        for field, event in _TIMES.items():
            if at := getattr(history.times, field):
                self.add(name, TraceStep(at=at, event=event, source="record"))
        if history.use:
            self.use[name] = history.use
        if history.outcome:
            self.outcomes[name] = history.outcome
        if history.received_at:
            self.add(name, TraceStep(at=history.received_at, event=ACCEPTED, source="record"))
        elif history.times.ended_at and history.outcome:
            details = {"outcome": history.outcome}
            self.add(name, TraceStep(at=history.times.ended_at, event=ENDED, source="record", details=details))

    def add_log(self, file: Path, source: Source) -> None:
        """Add the lines of a log that are about the round. Raises ConfigError if it cannot be read."""
        for line in _read_lines(file, self._number):
            if (line.get("run"), line.get("round")) != (self._run, self._number) or not _is_of_log(line):
                continue
            details = {name: value for name, value in line.items() if name not in _OF_EVERY_LINE}
            step = TraceStep(at=str(line["date"]), event=str(line["message"]), source=source, details=details)
            name = TaskName.parse(str(line.get("task")))
            if name is None:
                if source == "coordinator" and "device" not in line:
                    self.round_steps.append(step)
            elif self._device in (None, name.device):
                name = self.find(name)
                self.add(name, step)
                if "outcome" in details:
                    self.outcomes[name] = str(details["outcome"])

    def make_task(self, name: TaskName) -> TaskTrace:
        steps, use = _in_order(self.steps[name]), self.use.get(name, ResourceUse())
        at = {step.event: step.at for step in steps if step.source != "device"}
        end = at.get(ACCEPTED) or at.get(ENDED)
        outcome = self.outcomes.get(name)
        return TaskTrace(
            task=str(name),
            device=name.device,
            kind=name.kind,
            attempt=name.attempt,
            outcome="accepted" if ACCEPTED in at else outcome,
            reason=None if ACCEPTED in at else self.reasons.get(name),
            asked_at=at.get(ASKED),
            fetch_s=use.fetch_s,
            work_s=use.train_s,
            accept_s=_between(at.get(RECEIVED), at.get(ACCEPTED)),
            total_s=_between(at.get(ASKED), end),
            steps=steps,
        )


def _read_lines(file: Path, number: int) -> Iterator[dict[str, Any]]:
    """Read the lines in JSON that may be about a round."""
    wanted = f'"round": {number}'.encode()
    with name_failure(f"log {file} cannot be read", ConfigError, "FV1629"), file.open("rb") as lines:
        for raw in lines:
            if raw.startswith(b"{") and wanted in raw:
                try:
                    yield msgspec.json.decode(raw, type=dict[str, Any])
                except msgspec.MsgspecError:  # cut off when the process was killed
                    continue


def _is_of_log(line: dict[str, Any]) -> bool:
    """Return whether a line has what each line of our logs has; the file may be of another program."""
    try:
        return "message" in line and datetime.fromisoformat(str(line.get("date"))).tzinfo is not None
    except ValueError:
        return False


def _in_order(steps: list[TraceStep]) -> list[TraceStep]:
    """Sort steps by time, and set the time between them."""
    ordered = sorted(steps, key=lambda step: datetime.fromisoformat(step.at))
    times = [None, *(step.at for step in ordered)]
    return [
        msgspec.structs.replace(step, seconds=_between(last, step.at))
        for last, step in zip(times, ordered, strict=False)
    ]


def _between(first: str | None, second: str | None) -> float | None:
    if first is None or second is None:
        return None
    return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()
