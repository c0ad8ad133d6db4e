"""Incoming results: which of them may count, and how tasks end otherwise."""

import logging
from collections.abc import Iterable

from coordinator.record.tables import DeviceLog, RefusalRecord, now
from coordinator.rounds.acceptance import Acceptance
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.open_round import Missing
from coordinator.rounds.state import RunState
from coordinator.rounds.task_ends import TaskEnds
from coordinator.rounds.tasks import DeviceTask, TaskState
from coordinator.rounds.uploads import Uploads
from coordinator.rounds.validation import check_result
from fedvit.errors import BadPayload
from fedvit.wire.messages import Cancel, Declined, Failed, Result, ResultAck

log = logging.getLogger(__name__)

_GIVEN_UP = {
    Missing.DEADLINE: TaskState.DEADLINE,
    Missing.OFFLINE: TaskState.OFFLINE,
    Missing.CRASHED: TaskState.CRASHED,
    Missing.FAILED: TaskState.FAILED,
}


class ResultCollector:
    """Collects the results of one run.

    A result for the open round counts in it. A later one counts in the round that is open when it arrives
    (`RunState.counts_in`) if the run uses late results, and is refused otherwise.
    """

    def __init__(
        self, state: RunState, profiles: DeviceProfiles, *, acceptance: Acceptance, uploads: Uploads, ends: TaskEnds
    ) -> None:
        self._state = state
        self._profiles = profiles
        self._acceptance = acceptance
        self._uploads = uploads
        self._ends = ends

    # --- messages of devices ----------------------------------------------------------------------------

    def on_result(self, device: str, result: Result) -> None:
        """Accept or refuse a result; one that was accepted before is only acknowledged again."""
        state = self._state
        task = state.tasks.matching(device, result)
        if result.run != state.run:
            self._answer_other_run(device, result)
        elif task is None:
            if state.store.tasks.has_result(state.run, result.round, result.kind, device):
                self._acceptance.acknowledge(device, result)
            elif reason := self._why_never(device, result):
                self._ends.refuse(device, result, reason)
            # otherwise its round is about to be reopened after a restart: the device keeps the result until then
        elif task.state in (TaskState.UPLOADING, TaskState.CHECKED) or not state.presence.is_online(device):
            return  # the answer follows, at the latest after the device's hello
        elif not task.is_same(result) or result.program not in ("", task.work.planned.program):
            # not the device's fault: the task has changed since
            self._ends.refuse(
                device, result, f"it is of task {result.task}, expected is {task.id}: the task is sent again"
            )
            self._ends.resend(task)
        elif why := state.why_too_late(result):
            self._ends.reject(task, result, why, TaskState.LATE)
        else:
            self._check_message(task, result)

    def _check_message(self, task: DeviceTask, result: Result) -> None:
        """Check a result by its message, then its upload."""
        try:
            check_result(result, task.work.program, self._state.presence[task.device].hello)
        except BadPayload as error:
            self._ends.strike(task, result, str(error))
            return
        task.result = result
        upload_bytes = result.upload.size if result.upload else 0
        log.info("result received", extra={**task.log_fields(), "upload_bytes": upload_bytes})
        if result.upload is None:
            self._acceptance.add(task)
        elif result.inline:
            self._uploads.add_inline(task, result, result.upload)
        else:
            self._uploads.add(task, result, result.upload)

    def _answer_other_run(self, device: str, result: Result) -> None:
        """Refuse the result of a run that has ended. Any other run may be resumed, here or elsewhere: the device keeps
        the result and sends it when that run welcomes it."""
        state = self._state
        if state.store.runs.has_ended(result.run):
            self._ends.refuse(device, result, f"run {result.run!r} has ended")
        else:
            reason = f"run {result.run!r} is not served here now, but {state.run!r}"
            state.send(
                device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason, keep=True)
            )

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device reports that it cannot do its task; it repeats the report until it is answered."""
        state = self._state
        state.refuse(device, failed.kind, failed.reason, failed.round, failed.broke, attempt=failed.attempt)
        state.send(device, ResultAck(failed.run, failed.round, failed.kind, accepted=False))
        task = state.tasks.matching(device, failed)
        if task and task.is_same(failed) and task.state is not TaskState.CHECKED:
            self._profiles.learn(
                device, task.work.planned.expected, (failed.broke,) if failed.broke else (), failed.use
            )
            self._uploads.drop(task)
            self._ends.end_without_result(task, TaskState.FAILED)
            state.operator_log(f"{device} cannot {failed.kind} in round {failed.round}: {failed.reason}")
            if failed.log:
                state.store.devices.add_log(
                    DeviceLog(state.run, failed.round, device, failed.kind, failed.reason, now(), failed.log)
                )

    def on_declined(self, device: str, declined: Declined) -> None:
        """A device declines its task: it is left out without a strike, and asked again at the time that it named."""
        state = self._state
        state.send(device, ResultAck(declined.run, declined.round, declined.kind, accepted=False))
        task = state.tasks.matching(device, declined)
        if task is None or not task.is_same(declined) or task.state in (TaskState.UPLOADING, TaskState.CHECKED):
            return
        reason = f"{declined.reason[:200]}; asked again in {declined.again_s:.0f} s"
        state.store.devices.add_refusal(state.run, RefusalRecord(declined.round, device, "declined", reason))
        if device in state.presence:
            state.presence[device].backoff.begin(declined.reason, declined.again_s)
        self._ends.end_without_result(task, TaskState.DECLINED)
        state.operator_log(f"{device} declines to {declined.kind} in round {declined.round}: {reason}")

    def device_left(self, device: str) -> None:
        """A device went offline; if it returns, an interrupted upload starts again."""
        if task := self._state.tasks.of(device):
            task.note_left(self._state.config.rejoin_grace_s)
            task.progress = None
            if task.state is TaskState.UPLOADING:
                self._uploads.drop(task)
                task.to(TaskState.OFFERED)
        self._uploads.grant()

    def _why_never(self, device: str, result: Result) -> str | None:
        """The reason why a result without a task can never count; None if it still may."""
        state = self._state
        record = state.store.rounds.read(state.run, result.round)
        if record is None:
            return f"round {result.round} was never asked"
        if state.opened and state.opened.asked(result):
            if device not in state.opened.cohort:
                return f"{device} was not asked in round {result.round}"
            late = state.opened.failed.get(device) in (Missing.DEADLINE, Missing.OFFLINE, Missing.CRASHED)
            return f"late: round {result.round} no longer waits for it" if late else None
        match result.kind:
            case "train":
                over = record.closed_at is not None and not self._is_resumed_later(device, result)
            case "evaluate":
                over = record.evaluated
            case "compare":
                over = state.store.models.has(f"{state.run}-{result.round}")
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _is_resumed_later(self, device: str, result: Result) -> bool:
        """Return whether a late result is of a task that continues once the run does, after a restart or a pause."""
        state = self._state
        return state.config.uses_late_results() and any(
            task.device == device for task in state.store.tasks.read_unanswered(state.run, result.round)
        )

    # --- ends from this side ----------------------------------------------------------------------------

    def give_up(self, task: DeviceTask, why: Missing, reason: str) -> None:
        """End a task whose device sent nothing in time; `reason` is text for the operator."""
        state = self._state
        if state.opened and state.opened.kind == task.kind:
            state.opened.fail(task.device, why)
        state.refuse(task.device, task.kind, reason, task.round, lost=True, attempt=task.attempt)
        self.dismiss([task], f"late: round {task.round} no longer waits for it", _GIVEN_UP[why])

    def dismiss(self, tasks: Iterable[DeviceTask], reason: str, end: TaskState = TaskState.CANCELLED) -> None:
        """Cancel tasks: neither side keeps anything of them. An announced upload is refused with the reason; a checked
        result still counts."""
        for task in tasks:
            if task.has_ended:  # its result was stored together with that of a task before it
                continue
            self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason))
            if task.state is TaskState.CHECKED:
                self.commit(now=True)
                continue
            result = task.result
            self._uploads.drop(task)
            self._ends.end(task, end)
            if result:
                self._ends.refuse(task.device, result, reason)
            self._uploads.grant()

    def fail(self, task: DeviceTask, reason: str) -> None:
        """End a task because of an error on this side."""
        self._acceptance.forget(task.device)
        self._uploads.drop(task)
        self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason[:500]))
        self._ends.end_without_result(task, TaskState.FAILED)

    def pause(self) -> None:
        """Forget the open round and its tasks; this process will reopen it and assign them again."""
        self._state.opened = None
        self._acceptance.forget_all()  # none of them was acknowledged
        for task in self._state.tasks:  # in the store they are still under way
            self._uploads.drop(task)
            self._state.tasks.end(task, TaskState.CANCELLED)

    def close_round(self) -> None:
        """Close the open round; late results may still arrive if the run uses them."""
        self.commit(now=True)
        state = self._state
        opened, state.opened = state.opened, None
        if opened and opened.kind == "train":
            state.count_in(opened.number + 1)

    def commit(self, *, now: bool = False) -> None:
        """Store and acknowledge the checked results. To be called after each batch of events."""
        self._uploads.take_checked()
        self._acceptance.commit(now=now)
