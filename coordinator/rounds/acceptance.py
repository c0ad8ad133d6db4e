"""Valid results: they are stored together, then acknowledged."""

import logging
import time

import msgspec

from coordinator.record.backups import Accepted, Backups
from coordinator.record.tables import ANNOUNCED
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.isolation import ends_run
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.state import RunState
from coordinator.rounds.task_ends import TaskEnds
from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.wire.messages import Result, ResultAck

log = logging.getLogger(__name__)

BATCH_S = 0.05
"""Longest wait of a checked result for others that are stored in the same transaction."""


class Acceptance:
    """Accepts the results of one run. They are idempotent by (run, round, kind, device)."""

    def __init__(self, state: RunState, backups: Backups, profiles: DeviceProfiles, ends: TaskEnds) -> None:
        self._state = state
        self._backups = backups
        self._profiles = profiles
        self._ends = ends
        self._checked: dict[str, DeviceTask] = {}  # valid, not in the store yet
        self._noted: tuple[OpenRound, int] | None = None  # the round of the newest note, and the size of its cohort
        self._commit_at = 0.0  # when checked results are stored at the latest

    def add(self, task: DeviceTask) -> None:
        """Take a task whose result is valid. It is stored with the next `commit`."""
        if task.result and task.work.program.secure and task.device in self._state.presence:
            hello = self._state.presence[task.device].hello
            images = hello.train_samples if task.kind == "train" else hello.test_samples
            task.result = msgspec.structs.replace(task.result, metrics={ANNOUNCED: float(images)})
        task.to(TaskState.CHECKED)
        task.deadline.interrupted()
        if not self._checked:
            self._commit_at = time.monotonic() + BATCH_S
        self._checked[task.device] = task

    def forget(self, device: str) -> None:
        """Forget a result that was not acknowledged."""
        self._checked.pop(device, None)

    def forget_all(self) -> None:
        self._checked.clear()

    def commit(self, *, now: bool = False) -> None:
        """Store the checked results in one transaction, then acknowledge them.

        Unless `now` is set, results wait BATCH_S for others, except when the round is complete.
        """
        if not self._checked or not (now or time.monotonic() >= self._commit_at or self._is_complete()):
            return
        batch, self._checked = list(self._checked.values()), {}
        self._write(batch)
        self._ends.note(batch, TaskState.ACCEPTED)
        for task in batch:
            try:
                self._accept(task)
            except Exception as error:
                if ends_run(error):
                    raise
                self._ends.add_error(task.device, error)

    def acknowledge(self, device: str, result: Result) -> None:
        self._state.send(device, ResultAck(result.run, result.round, result.kind, accepted=True))

    def _write(self, batch: list[DeviceTask]) -> None:
        """Write first the uploads, then a note outside the record, then the record."""
        state = self._state
        with state.blobs.commit_together() as batched_commit:
            for task in batch:
                if task.content is not None:
                    batched_commit.put(task.content)
        accepted = [
            (task.device, task.result, state.counts_in if task.kind == "train" else None)
            for task in batch
            if task.result
        ]
        number, cohort, needed = state.counts_in, None, None
        if state.opened:
            number = state.opened.number
            noted = state.opened, len(state.opened.cohort)
            if state.opened.kind == "train" and self._noted != noted:  # once: it is as long as all results together
                cohort, needed = sorted(state.opened.cohort), state.opened.needed
                self._noted = noted
        self._backups.note(Accepted(number, cohort, needed, accepted))
        state.add_results(state.store.tasks.add_results(accepted, {task.device: task.times for task in batch}))

    def _accept(self, task: DeviceTask) -> None:
        """Acknowledge a result that is in the store, and update the round."""
        state, device, result = self._state, task.device, task.result
        assert result is not None  # it was checked
        if task.kind == "train":
            state.counted.add(device)
        if state.opened and device in state.opened.cohort and state.opened.kind == task.kind:
            state.opened.accept(device)
        if device in state.presence:
            state.presence[device].backoff.crashes = 0
        self._profiles.learn(device, task.work.planned.expected, result.use.broke, result.use)
        self.acknowledge(device, result)
        for what in result.damaged:
            state.refuse(device, "damage", what, result.round)
            state.operator_log(f"{device}: {what}")
        staleness = state.counts_in - result.round if task.kind == "train" else 0
        log.info("result accepted", extra={**task.log_fields(), "samples": result.samples, "staleness": staleness})

    def _is_complete(self) -> bool:
        """Return whether the checked results complete the open round."""
        opened = self._state.opened
        if opened is None:
            return True
        answered = len(opened.accepted) + len(self._checked)
        return answered >= opened.needed or answered + len(opened.failed) >= len(opened.cohort)
