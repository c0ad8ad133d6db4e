"""Spans of a run's rounds and tasks. Those of a device's steps are children of its task's."""

from typing import TYPE_CHECKING

from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.task_names import TaskName
from fedvit.tracing import Attributes, Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RunSpans:
    """The spans of one run; without `tracing` nothing happens. All methods are for the thread that serves the run."""

    def __init__(self, run: str, tracing: Tracing | None) -> None:
        self._run = run
        self._tracing = tracing
        self._number = 0
        self._round: Span | None = None
        self._tasks: dict[TaskName, Span] = {}

    def open_round(self, number: int, kind: str, cohort: int) -> None:
        """Note that a round asks its cohort; its span lasts from its training to the end of its evaluation."""
        if self._tracing is None:
            return
        if self._round is None or number != self._number:
            self.close_round()
            of_round: Attributes = {"fedvit.run": self._run, "fedvit.round": number}
            self._number, self._round = number, self._tracing.begin(f"round {number}", of_round)
        self._round.add_event("round opened", {"kind": kind, "cohort": cohort})

    def close_round(self) -> None:
        """Note that a round is finished; its tasks may go on."""
        if self._round:
            self._round.end()
        self._round = None

    def ask(self, task: DeviceTask) -> str:
        """Note that a task is sent; return its traceparent for the device, empty without tracing."""
        if self._tracing is None:
            return ""
        name = task.name
        if (span := self._tasks.get(name)) is None:
            for earlier in [one for one in self._tasks if one[:4] == name[:4]]:
                self._tracing.end(self._tasks.pop(earlier), error="the device's process ended")
            of_task = {f"fedvit.{field}": value for field, value in name.fields().items()}
            span = self._tasks[name] = self._tracing.begin(f"{task.kind} task", of_task, parent=self._round)
        else:
            span.add_event("asked again")
        return self._tracing.describe(span)

    def end(self, task: DeviceTask, state: TaskState) -> None:
        """Note the end of a task."""
        if self._tracing and (span := self._tasks.pop(task.name, None)):
            span.set_attribute("fedvit.outcome", state.value)
            self._tracing.end(span, error="" if state is TaskState.ACCEPTED else state.value)

    def close(self) -> None:
        """End and send all spans."""
        if self._tracing is None:
            return
        for span in self._tasks.values():
            self._tracing.end(span, error="the run stopped")
        self._tasks.clear()
        self.close_round()
        self._tracing.close()
