"""Answers to tasks that the coordinator has not acknowledged: kept, sent, and sent again until it has.

Results are in the vault, too, and so outlive the process. A failed or declined task is kept in memory alone.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from edge_client.link.resending import Resend
from edge_client.storage.device_storage import DeviceStorage
from edge_client.storage.integrity import DamagedBlobs
from fedvit.errors import StorageFailed
from fedvit.resources import BudgetKind, ResourceUse
from fedvit.task_names import describe_attempt
from fedvit.wire.messages import Declined, Failed, Result, ResultAck, Task, TaskKind, inline_room

log = logging.getLogger(__name__)

Answer = Result | Failed | Declined
AnswerKey = tuple[str, int, TaskKind]
"""Run, round and kind of the task."""


@dataclass
class _Waiting:
    answer: Answer
    resend: Resend
    not_known_in: int | None = None  # the epoch in which the coordinator does not serve the task's run


class FailureText(NamedTuple):
    """The text that goes with a failure to the coordinator."""

    recent_log: Callable[[], str] = lambda: ""
    """Returns the newest lines of the log."""
    hide: Callable[[str], str] = str
    """Returns a reason without private paths."""


NO_TEXT = FailureText()


class Answers:
    """A device's answers that wait for their acknowledgement. `send` sends a message to the coordinator."""

    def __init__(self, storage: DeviceStorage, *, send: Callable[[Answer], None], failure_text: FailureText) -> None:
        self.counts: Counter[tuple[TaskKind, str]] = Counter()  # since the start, by kind of task and of message
        self.least_resend_s = 0.0  # for answers from now on: a large cohort keeps the coordinator busy
        self._vault = storage.vault
        self._blobs = storage.blobs
        self._integrity = storage.integrity
        self._ledger = storage.ledger
        self._note_sent = storage.note_sent
        self._send = send
        self._failure_text = failure_text
        self._waiting: dict[AnswerKey, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: AnswerKey) -> bool:
        return key in self._waiting

    def result(self, key: AnswerKey) -> Result | None:
        """The result of this task that waits."""
        waiting = self._waiting.get(key)
        return waiting.answer if waiting and isinstance(waiting.answer, Result) else None

    def uploads(self) -> set[str]:
        """Digests of the uploads of results that wait."""
        answers = (waiting.answer for waiting in self._waiting.values())
        return {answer.upload.digest for answer in answers if isinstance(answer, Result) and answer.upload}

    def has_served_results(self) -> bool:
        """Return True if a result waits whose run the coordinator serves."""
        return any(
            isinstance(waiting.answer, Result) and waiting.not_known_in is None for waiting in self._waiting.values()
        )

    def keep(self, answer: Answer) -> None:
        """From now on the answer is sent again until it is acknowledged."""
        self._waiting[answer.run, answer.round, answer.kind] = _Waiting(answer, Resend(self.least_resend_s))

    def add(self, answer: Answer) -> None:
        """Send a new answer."""
        if not isinstance(answer, Result):
            answer = msgspec.structs.replace(answer, reason=self._failure_text.hide(answer.reason))
        self.counts[answer.kind, type(answer).__name__.lower()] += 1
        self.keep(answer)
        self.send(answer)

    def fail(
        self, task: Task | Result, reason: str, broke: BudgetKind | None = None, use: ResourceUse | None = None
    ) -> None:
        """Report with the last lines of the log why a task failed, or why its result cannot be sent."""
        lines = self._failure_text.recent_log()
        try:
            if lines and not self._ledger.note_log(task, lines):
                lines = ""
        except StorageFailed:  # nothing leaves the device without a line
            lines = ""
        why = self._failure_text.hide(reason)[:500]
        self.add(Failed(task.run, task.round, task.kind, why, broke, use, task.task, lines, task.attempt))

    def send_due(self) -> None:
        """Send again what has waited for too long."""
        for waiting in list(self._waiting.values()):
            if waiting.not_known_in is None and waiting.resend.due():
                self.send(waiting.answer, again=True)

    def send_all(self, epoch: int) -> None:
        """Send all answers to a coordinator of this epoch, but those of runs that it does not serve."""
        for waiting in list(self._waiting.values()):
            if waiting.not_known_in != epoch:
                waiting.not_known_in = None
                self.send(waiting.answer)

    def send(self, answer: Answer, *, again: bool = False) -> None:
        """Send an answer. A small upload goes inside the message, unless it is sent `again`: then the coordinator has
        it, or fetches it. A damaged upload is not sent, nor is a result without its line in the ledger."""
        try:
            if isinstance(answer, Result):
                self._note_sent(answer)
        except StorageFailed as error:
            log.warning("result not sent yet", extra={**describe_attempt(answer), "reason": str(error)})
            return
        if isinstance(answer, Result) and answer.upload:
            self._send_with_upload(answer, answer.upload.digest, again=again)
        else:
            self._send(answer)

    def _send_with_upload(self, result: Result, digest: str, *, again: bool) -> None:
        try:
            self._integrity.check([digest])
            if not self._blobs.has(digest):
                self._forget(result, f"its upload {digest} is not in {self._blobs.folder} any more")
                return
            if result.upload and result.upload.chunk != self._blobs.chunk_bytes:  # made at a broker with other limits
                result = msgspec.structs.replace(result, upload=self._blobs.manifest(digest))
            if result.upload and not again and result.upload.size <= inline_room(result):
                result = msgspec.structs.replace(result, inline=self._integrity.read(digest))
        except DamagedBlobs:
            self._forget(result, f"its upload {digest} was damaged in {self._blobs.folder}")
        except StorageFailed as error:
            log.warning("result not sent yet", extra={**describe_attempt(result), "reason": str(error)})
        else:
            self._send(result)

    def _forget(self, result: Result, reason: str) -> None:
        """Give up a result that cannot be sent: a newer task removed its upload, or the file was deleted."""
        log.error("result lost", extra={**describe_attempt(result), "reason": reason})
        if result.kind == "train":
            self._settle(result.run, result.round, accepted=False)
        self.fail(result, reason)

    def acknowledge(self, ack: ResultAck, epoch: int | None) -> bool:
        """Take an acknowledgement by the coordinator of this epoch into account. False if it refused a result."""
        key = (ack.run, ack.round, ack.kind)
        if ack.keep:
            waiting = self._waiting[key]
            log.info("result kept for later", extra={**describe_attempt(waiting.answer), "reason": ack.reason})
            waiting.not_known_in = epoch
            return True
        answer = self._waiting.pop(key).answer
        if not isinstance(answer, Result):
            return True
        if ack.kind == "train":
            self._settle(ack.run, ack.round, accepted=ack.accepted)
        if ack.accepted:
            log.info("result accepted", extra=describe_attempt(answer))
            return True
        log.warning("result refused", extra={**describe_attempt(answer), "reason": ack.reason})
        if answer.upload:
            with contextlib.suppress(StorageFailed):  # damage may be the reason; the next result reports it
                self._integrity.check([answer.upload.digest], afresh=True)
        return False

    def _settle(self, run: str, number: int, *, accepted: bool) -> None:
        try:
            self._vault.settle(run, number, accepted=accepted)
        except StorageFailed as error:  # the device continues; after a restart it sends the result again
            log.error("result not settled", extra={"run": run, "round": number, "reason": str(error)})

    def drop(self, key: AnswerKey) -> None:
        """Forget the failure of a task that was cancelled; its result still waits for an acknowledgement."""
        if key in self._waiting and self.result(key) is None:
            del self._waiting[key]

    def drop_all(self, run: str | None = None, *, with_results: bool = False) -> None:
        """Forget the failures of all tasks, or of a run, and `with_results` the results, too."""
        for key in [key for key in self._waiting if run in (None, key[0])]:
            if with_results or self.result(key) is None:
                del self._waiting[key]
