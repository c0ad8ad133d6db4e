"""The task of a device: at most one at a time, from its receipt to its answer."""

import contextlib
import logging
import time
from collections.abc import Collection

import msgspec

from edge_client.health.guard import Exceeded
from edge_client.health.history import History
from edge_client.health.readiness import NotNow, Readiness
from edge_client.link.session import Session
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.integrity import DamagedBlobs
from edge_client.work.fetcher import BlobFetcher
from edge_client.work.runtime import Stopped
from edge_client.work.spans import StepSpans
from edge_client.work.task_executor import TaskExecution, TaskExecutor, Worked
from fedvit.errors import (
    BadPayload,
    DeviceTrouble,
    FedvitError,
    NotAllowed,
    OverBudget,
    StorageFailed,
    describe_fault,
)
from fedvit.task_names import describe_attempt
from fedvit.tracing import Tracing
from fedvit.wire.messages import Cancel, Declined, Extended, ResultAck, Task

log = logging.getLogger(__name__)

IMAGES_AGAIN_S = 60.0
"""A device without an image to train with declines, and is asked again after this time."""


class CurrentTask:
    """The task of a device, and the images that its run uses."""

    def __init__(
        self,
        session: Session,
        storage: DeviceStorage,
        worker: TaskExecutor,
        readiness: Readiness,
        history: History,
        tracing: Tracing | None = None,
    ) -> None:
        self.execution: TaskExecution | None = None
        self._session = session
        self._link = session.link
        self._answers = session.link.answers
        self._storage = storage
        self._worker = worker
        self._readiness = readiness
        self._history = history
        self._spans = StepSpans(session.link.identity.device, tracing)
        self._fetcher = BlobFetcher(session.link, storage, worker, readiness.policy, self.fail)
        self._run_classes: Collection[str] | None = None  # other images are not used; None: no run has a task here
        self._run: str | None = None  # of the newest task

    def tick(self) -> None:
        """Fail a task whose round closes without this device: continuing would only cost energy."""
        execution = self.execution
        if execution and time.monotonic() > execution.expires_at:
            self.fail(execution, OverBudget("FV1421", f"not done within the deadline of {execution.allowed_s:.0f} s"))
        if self.execution is None:
            self._storage.integrity.scrub()

    # --- messages -------------------------------------------------------------------------------------

    def take(self, task: Task) -> None:
        """Start a task, decline it, or send its answer again."""
        self._answers.least_resend_s = task.progress_s
        if self.execution and self.execution.matches(task):  # the coordinator restarted, or the link was cut
            self.execution.expires_at = time.monotonic() + task.deadline_s
            return
        if result := self._answers.result((task.run, task.round, task.kind)):
            self._answers.send(result)
            return
        self._answers.drop_all()
        self.drop()
        if not_now := self._readiness.not_now():
            if not_now.is_forbidden:
                self._note_refusal(task, not_now.reason)
            self._decline(task, not_now, logging.INFO)
            return
        try:
            self._run_classes, self._run = self._classes_of(task), task.run
            if self.refresh_images():
                self._session.announce()  # before the result, with which the coordinator compares it
        except FedvitError as error:
            reason = f"images cannot be used: {error}"[:500]
            self._decline(task, NotNow(reason, IMAGES_AGAIN_S), logging.WARNING)
            return
        self.execution = TaskExecution(task, time.monotonic() + task.deadline_s, task.deadline_s)
        log.info("task received", extra=describe_attempt(task))
        self._fetcher.fetch_missing(self.execution)

    def _decline(self, task: Task, not_now: NotNow, level: int) -> None:
        log.log(level, "task declined", extra={**describe_attempt(task), "reason": not_now.reason})
        self._history.note_end(task, f"declined ({not_now.reason})")
        self._answers.add(
            Declined(task.run, task.round, task.kind, not_now.reason, not_now.again_s, task.task, task.attempt)
        )

    def extend(self, extended: Extended) -> None:
        execution = self.execution
        if execution and execution.matches(extended):
            now = time.monotonic()
            execution.allowed_s += now + extended.deadline_s - execution.expires_at
            execution.expires_at = now + extended.deadline_s

    def cancel(self, cancel: Cancel) -> None:
        """Discard a running task, or the report of its failure; a finished result still waits for its answer."""
        self._answers.drop((cancel.run, cancel.round, cancel.kind))
        if self.execution and self.execution.matches(cancel):
            log.info("task cancelled", extra={**describe_attempt(self.execution.task), "reason": cancel.reason})
            self.drop()

    def acknowledge(self, ack: ResultAck) -> None:
        """Take an acknowledgement of an answer into account."""
        if not ack.keep:
            self._spans.end_upload((ack.run, ack.round, ack.kind), "" if ack.accepted else ack.reason or "refused")
        if (ack.run, ack.round, ack.kind) not in self._answers:
            if self.execution and self.execution.matches(ack) and not ack.keep:
                self.drop()  # the task was sent again before this arrived
        elif not self._answers.acknowledge(ack, self._session.epoch):
            self._history.note_error(f"round {ack.round} of {ack.run}: the result was refused: {ack.reason}")

    def end_run(self, run: str) -> bool:
        """Drop the task of an ended run; False if the task is of another run, whose end this is not."""
        if self.execution and self.execution.task.run != run:
            return False
        self.drop()
        self._run_classes = None
        return True

    def forget_other_run(self, run: str | None) -> None:
        """Use all images again if the coordinator serves another run: the end of the last one was not heard."""
        if self._run not in (None, run):
            self._run_classes = None

    # --- images ---------------------------------------------------------------------------------------

    def refresh_images(self) -> bool:
        """Take changes of the folder into account; True if the device has to announce itself again.

        Raises DataError when there is no image to train with.
        """
        if self.execution and self.execution.working:
            return False
        if self._answers.has_served_results():
            return False  # the coordinator compares a result with the numbers that were announced before it
        before = self._storage.data
        if not self._storage.images.look(self._run_classes):
            return False
        data = self._storage.data
        self._session.update_class_list()
        log.info("images changed", extra={"train": len(data.train), "test": len(data.test)})
        self._storage.images.log_problems()
        return before.counts != data.counts

    def _classes_of(self, task: Task) -> Collection[str]:
        """Return the classes whose images can be used for the task.

        They are those of the run once its program is here, else those that were announced, since the coordinator
        refuses a device with others.
        """
        with contextlib.suppress(DamagedBlobs):
            if self._storage.blobs.has(task.program):
                return self._storage.program(task.program).classes
        return self._storage.data.classes

    # --- the end --------------------------------------------------------------------------------------

    def finish(self, worked: Worked) -> None:
        """Answer a task whose work ended, or fetch the blobs that were damaged."""
        execution, result, error = worked
        self._storage.images.log_problems()  # images that could not be decoded
        if result:
            if self._storage.vault.is_over(result.run):  # it was done just when the run ended
                self._storage.end_run(result.run)
                return
            self._spans.note_work(execution)
            self._spans.begin_upload(execution)
            result = msgspec.structs.replace(result, damaged=self._storage.integrity.reports())
            self._answers.add(result)
            log.info(
                "task done",
                extra={**describe_attempt(execution.task), "samples": result.samples, **result.metrics},
            )
            self._history.note_end(execution.task, "done", result)
            if execution is self.execution:
                self.execution = None
        elif isinstance(error, DamagedBlobs):
            if execution is self.execution:
                self._fetcher.fetch_again(execution, error)
        elif error and not isinstance(error, Stopped):
            self.fail(execution, error)

    def fail(self, execution: TaskExecution, error: Exception) -> None:
        """Report to the coordinator why this task failed; the device stays for the next one."""
        if execution is not self.execution:
            return
        self._spans.note_work(execution, str(error))
        if isinstance(error, NotAllowed | OverBudget | BadPayload | DeviceTrouble):  # a hostile task could cause it
            self._note_refusal(execution.task, str(error))
        if isinstance(error, NotAllowed):
            self.drop()
            self._decline(execution.task, NotNow(str(error)[:500], error.again_s), logging.WARNING)
            return
        task = execution.task
        fields = {**describe_attempt(task), "reason": str(error)}
        log.error("task failed", extra=fields, exc_info=not isinstance(error, FedvitError) and error)
        reason = describe_fault(error)
        self._history.note_error(f"round {task.round} of {task.run}: {reason}")
        self._history.note_end(task, "failed", failure=error)
        self.drop()
        broke, use = (error.broke, error.use) if isinstance(error, Exceeded) else (None, None)
        self._answers.fail(task, reason, broke, use)

    def _note_refusal(self, task: Task, reason: str) -> None:
        with contextlib.suppress(StorageFailed):  # the log has it
            self._storage.ledger.note_refusal(task, reason)

    def drop(self) -> None:
        """Stop the task without an answer."""
        if self.execution:
            self.execution.stop.set()
            self.execution = None
            self._link.cancel_fetches()
