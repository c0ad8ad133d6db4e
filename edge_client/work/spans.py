"""Spans of a device's steps, children of the coordinator's span of the task: fetch, train or evaluate, upload."""

import time
from typing import TYPE_CHECKING

from edge_client.work.task_executor import TaskExecution
from fedvit.task_names import TaskName
from fedvit.tracing import Tracing, unix_ns

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Key = tuple[str, int, str]
"""Run, round and kind of a task."""


class StepSpans:
    """The spans of one device; nothing happens without `tracing`, or for tasks that the coordinator does not trace."""

    def __init__(self, device: str, tracing: Tracing | None) -> None:
        self._device = device
        self._tracing = tracing
        self._uploads: dict[Key, Span] = {}

    def note_work(self, execution: TaskExecution, error: str = "") -> None:
        """Note that the work of a task has ended now, or its transfers if it never began."""
        if self._tracing is None or not execution.task.trace:
            return
        now, fetched_at = time.monotonic(), None
        if execution.fetch_s is not None:
            fetched_at = execution.received_at + execution.fetch_s
        fetch = self._begin("fetch", execution, execution.received_at)
        fetch.set_attribute("fedvit.fetched_bytes", execution.fetched_bytes)
        self._tracing.end(fetch, error="" if fetched_at else error, at_ns=unix_ns(fetched_at or now))
        if fetched_at:
            self._tracing.end(self._begin(execution.task.kind, execution, fetched_at), error=error)

    def begin_upload(self, execution: TaskExecution) -> None:
        """Note that a result is sent."""
        if self._tracing is not None and execution.task.trace:
            self._uploads[execution.key] = self._begin("upload", execution, time.monotonic())

    def end_upload(self, key: Key, error: str = "") -> None:
        """Note that a result was accepted, or refused with a reason."""
        if self._tracing and (span := self._uploads.pop(key, None)):
            self._tracing.end(span, error=error)

    def _begin(self, step: str, execution: TaskExecution, at: float) -> "Span":
        assert self._tracing is not None  # checked by the callers
        task = execution.task
        of_step = {"fedvit.task": str(TaskName.of(task, self._device)), "fedvit.device": self._device}
        return self._tracing.begin(step, of_step, parent=task.trace, at_ns=unix_ns(at))
