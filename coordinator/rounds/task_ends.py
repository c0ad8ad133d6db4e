"""The ends of tasks, and their consequences: free devices, strikes, tasks to send again, errors."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from coordinator.rounds.open_round import Missing
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.wire.messages import Result, ResultAck

log = logging.getLogger(__name__)

_MISSING: Mapping[TaskState, Missing] = {
    TaskState.DECLINED: Missing.DECLINED,
    TaskState.FAILED: Missing.FAILED,
    TaskState.LATE: Missing.FAILED,
}


class Strike(NamedTuple):
    """A result that an honest device would not send."""

    device: str
    round: int
    reason: str


class TaskEnds:
    """Ends the tasks of one run. A refusal is recorded in the store, answered with the reason, and never fatal."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._freed: list[str] = []
        self._strikes: list[Strike] = []
        self._to_resend: list[DeviceTask] = []
        self._errors: list[tuple[str, Exception]] = []

    # --- consequences -----------------------------------------------------------------------------------

    def take_freed(self) -> list[str]:
        """Devices whose task has ended since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def take_strikes(self) -> list[Strike]:
        strikes, self._strikes = self._strikes, []
        return strikes

    def take_errors(self) -> list[tuple[str, Exception]]:
        """Unexpected errors of this side in handling results, by device."""
        errors, self._errors = self._errors, []
        return errors

    def take_to_resend(self) -> list[DeviceTask]:
        """Tasks for which the device sent the result of another task: they have to be sent again."""
        tasks, self._to_resend = self._to_resend, []
        return tasks

    def add_error(self, device: str, error: Exception) -> None:
        self._errors.append((device, error))

    def resend(self, task: DeviceTask) -> None:
        self._to_resend.append(task)

    # --- refusals ---------------------------------------------------------------------------------------

    def refuse(self, device: str, result: Result, reason: str) -> None:
        """Answer with a refusal; the device's current task, if any, continues."""
        self._state.refuse(device, result.kind, reason, result.round, attempt=result.attempt)
        answer = ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason[:500])
        self._state.send(device, answer)

    def reject(self, task: DeviceTask, result: Result, reason: str, end: TaskState = TaskState.FAILED) -> None:
        """Refuse the result of a task, which ends the task."""
        self.refuse(task.device, result, reason)
        self._state.operator_log(f"{task.device}: {result.kind} result of round {result.round} refused: {reason}")
        self.end_without_result(task, end)

    def strike(self, task: DeviceTask, result: Result, reason: str) -> None:
        """Reject a result that an honest device would not send."""
        self.reject(task, result, reason)
        self._strikes.append(Strike(task.device, result.round, reason))

    # --- ends -------------------------------------------------------------------------------------------

    def end_without_result(self, task: DeviceTask, end: TaskState) -> None:
        """End a task without a result that counts."""
        opened = self._state.opened
        if opened and opened.kind == task.kind:
            opened.fail(task.device, _MISSING[end])
        self.end(task, end)

    def end(self, task: DeviceTask, end: TaskState) -> None:
        """End a task, in the record, too."""
        trained = [(task.round, task.device)] if task.kind == "train" else []
        self._state.store.tasks.end(self._state.run, trained, end, {task.device: task.times})
        self.note([task], end)

    def note(self, tasks: list[DeviceTask], end: TaskState) -> None:
        """Note the end of tasks that the record has already."""
        for task in tasks:
            self._state.tasks.end(task, end)
            self._state.spans.end(task, end)
            if end is not TaskState.ACCEPTED:  # accepted results have a line with their figures
                log.info("task ended", extra={**task.log_fields(), "outcome": end.value})
            task.content = None  # an ended task may stay in memory until its deadline
            self._freed.append(task.device)
