"""Incoming results: uploads are fetched and checked, results are stored and acknowledged; and how tasks end."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from coordinator.record.backups import Accepted, Backups
from coordinator.record.rows import now
from coordinator.record.tables import DeviceLog
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.isolation import ends_run
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.state import RunState
from coordinator.rounds.tasks import Task, TaskState
from coordinator.rounds.validation import check_free_space, check_labels, check_result, check_upload
from fedvit.blobs import digest_of
from fedvit.errors import BadPayload
from fedvit.program import LABELS
from fedvit.transport.blob_receiver import LARGE_BYTES
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Cancel, Declined, Failed, Manifest, Result, ResultAck
from fedvit.wire.transfer import WINDOW_CHUNKS
from profiles.probes.host import free_disk_bytes

log = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4 * WINDOW_CHUNKS
"""Chunks of uploads that may be in flight at the same time, so that a cohort cannot overrun the broker's queues: four
large uploads with full windows, or more of small ones."""

BATCH_S = 0.05
"""Longest wait of a checked result for others that are stored in the same transaction."""

MIRRORED_AT_ONCE = 8
"""Uploads that are put into the mirror of the run at the same time."""

_MISSING = {
    TaskState.DECLINED: Missing.DECLINED,
    TaskState.FAILED: Missing.FAILED,
    TaskState.LATE: Missing.FAILED,
}
_GIVEN_UP = {
    Missing.DEADLINE: TaskState.DEADLINE,
    Missing.OFFLINE: TaskState.OFFLINE,
    Missing.CRASHED: TaskState.CRASHED,
    Missing.FAILED: TaskState.FAILED,
}


class Strike(NamedTuple):
    """A result that an honest device would not send."""

    device: str
    round: int
    reason: str


class ResultCollector:
    """Collects the results of one run.

    A result for the open round counts in it. A later one counts in the round that is open when it arrives
    (`RunState.counts_in`) if the run uses late results, and is refused otherwise. Results are idempotent by (run,
    round, kind, device). A refusal is recorded in the store, answered with the reason, and never fatal. The
    consequences for other parts are returned by `take_freed`, `take_strikes`, `take_to_resend` and `take_errors`.
    """

    def __init__(self, state: RunState, exchange: BlobExchange, backups: Backups, profiles: DeviceProfiles) -> None:
        self._state = state
        self._exchange = exchange
        self._backups = backups
        self._profiles = profiles
        self._waiting: dict[str, Task] = {}  # uploads that are queued, in the order of arrival
        self._fetching: dict[str, Task] = {}  # uploads that are being fetched or checked
        self._checked: dict[str, Task] = {}  # valid, not in the store yet
        self._checker = ThreadPoolExecutor(MIRRORED_AT_ONCE if state.mirror else 1, "upload-check")
        self._noted: tuple[OpenRound, int] | None = None  # the round of the newest note, and the size of its cohort
        self._commit_at = 0.0  # when checked results are stored at the latest
        self._freed: list[str] = []
        self._strikes: list[Strike] = []
        self._to_resend: list[Task] = []
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

    def take_to_resend(self) -> list[Task]:
        """Tasks for which the device sent the result of another task: they have to be sent again."""
        tasks, self._to_resend = self._to_resend, []
        return tasks

    # --- messages of devices ----------------------------------------------------------------------------

    def on_result(self, device: str, result: Result) -> None:
        """Accept or refuse a result; one that was accepted before is only acknowledged again."""
        state = self._state
        task = state.tasks.matching(device, result)
        if result.run != state.run:
            self._answer_other_run(device, result)
        elif task is None:
            if state.store.tasks.has_result(state.run, result.round, result.kind, device):
                self._acknowledge(device, result)
            elif reason := self._why_never(device, result):
                self._refuse(device, result, reason)
            # otherwise its round is about to be reopened after a restart: the device keeps the result until then
        elif task.state in (TaskState.UPLOADING, TaskState.CHECKED) or not state.presence.is_online(device):
            return  # the answer follows, at the latest after the device's hello
        elif not task.is_same(result) or result.program not in ("", task.work.digest):
            # not the device's fault: the task has changed since
            self._refuse(device, result, f"it is of task {result.task}, expected is {task.id}: the task is sent again")
            self._to_resend.append(task)
        elif why := self._too_late(result):
            self._reject(task, result, why, TaskState.LATE)
        else:
            self._check_message(task, result)

    def _check_message(self, task: Task, result: Result) -> None:
        """Check a result by its message, then its upload."""
        try:
            check_result(result, task.work.program, self._state.presence[task.device].hello)
        except BadPayload as error:
            self._strike(task, result, str(error))
            return
        task.result = result
        if result.upload is None:
            self._set_checked(task)
        elif result.inline:
            self._take_inline(task, result)
        else:
            self._await_upload(task, result, result.upload)

    def _answer_other_run(self, device: str, result: Result) -> None:
        """Refuse the result of a run that has ended. Any other run may be resumed, here or elsewhere: the device keeps
        the result and sends it when that run welcomes it."""
        state = self._state
        if state.store.runs.has_ended(result.run):
            self._refuse(device, result, f"run {result.run!r} has ended")
        else:
            reason = f"run {result.run!r} is not served here now, but {state.run!r}"
            state.send(
                device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason, keep=True)
            )

    def _await_upload(self, task: Task, result: Result, upload: Manifest) -> None:
        """Queue the upload for fetching, if the disk has space for it."""
        try:
            check_free_space(upload, free_disk_bytes(self._state.blobs.folder))
        except BadPayload as error:
            self._reject(task, result, str(error))
            return
        task.to(TaskState.UPLOADING)
        self._waiting[task.device] = task
        self.grant_uploads()

    def _take_inline(self, task: Task, result: Result) -> None:
        """Check an upload that came inside the message."""
        content = result.inline
        task.result = result = msgspec.structs.replace(result, inline=b"")
        assert result.upload is not None  # checked by the caller
        if digest_of(content) != result.upload.digest:
            reason = f"the upload of {len(content)} bytes has digest {digest_of(content)}"
            self._reject(task, result, f"{reason}, expected {result.upload.digest}")
            return
        task.content = content
        if self._state.mirror:
            task.to(TaskState.UPLOADING)
            self._fetching[task.device] = task
            task.check = self._checker.submit(self._check_of(task))
        else:
            self._finish_check(task)

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device reports that it cannot do its task; it repeats the report until it is answered."""
        state = self._state
        state.refuse(device, failed.kind, failed.reason, failed.round, failed.broke)
        state.send(device, ResultAck(failed.run, failed.round, failed.kind, accepted=False))
        task = state.tasks.matching(device, failed)
        if task and task.is_same(failed) and task.state is not TaskState.CHECKED:
            self._profiles.learn(device, task.work.expected, (failed.broke,) if failed.broke else (), failed.use)
            self._drop_upload(task)
            self._end_without_result(task, TaskState.FAILED)
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
        state.store.devices.add_refusal(state.run, declined.round, device, "declined", reason, None)
        state.presence.back_off(device, declined.reason, declined.again_s)
        self._end_without_result(task, TaskState.DECLINED)
        state.operator_log(f"{device} declines to {declined.kind} in round {declined.round}: {reason}")

    def device_left(self, device: str) -> None:
        """A device went offline; if it returns, an interrupted upload starts again."""
        if task := self._state.tasks.of(device):
            task.note_left(self._state.config.rejoin_grace_s)
            task.progress = None
            if task.state is TaskState.UPLOADING:
                self._drop_upload(task)
                task.to(TaskState.OFFERED)
        self.grant_uploads()

    # --- uploads ----------------------------------------------------------------------------------------

    def waiting(self) -> Collection[str]:
        """Devices that this side keeps waiting with their uploads."""
        if not self._exchange.has_store:
            return self._waiting.keys()
        for_store = {
            device
            for device, task in self._fetching.items()
            if task.check is not None
            or (task.result and task.result.upload and self._exchange.is_awaited(task.result.upload.digest))
        }
        return for_store.union(self._waiting)

    def uploads(self) -> Collection[Task]:
        """Tasks whose uploads are being fetched, as a view."""
        return self._fetching.values()

    def grant_uploads(self) -> None:
        """Start fetching queued uploads, as far as CHUNKS_AT_ONCE allows; one at a time at a broker with a limit on a
        connection's messages, since it counts those that it delivers, too."""
        one_at_a_time = self._state.limits.publishes_per_s > 0
        chunks = sum(map(_window_of, self._fetching.values()))
        while self._waiting:
            device, task = next(iter(self._waiting.items()))
            assert task.result is not None  # only those are queued
            assert task.result.upload is not None
            chunks += _window_of(task)
            if self._fetching and (one_at_a_time or chunks > CHUNKS_AT_ONCE):
                return
            self._fetching[device] = self._waiting.pop(device)
            task.deadline.kept_waiting(time.monotonic())
            upload = task.result.upload
            topic = self._state.topics.upload(device, upload.digest)
            self._exchange.fetch(upload, device, topic, self._upload_finished(task, task.result))

    def _upload_finished(self, task: Task, result: Result) -> Callable[[Manifest, Exception | None], None]:
        device, began = task.device, time.monotonic()

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if self._fetching.get(device) is not task or task.result is not result:
                return  # the device left, or the upload was cancelled
            if error is None:
                self._state.links.measured(device, manifest.size, time.monotonic() - began)
                # checked in a thread, and mirrored; messages and other uploads are handled meanwhile
                if self._state.mirror or manifest.size >= LARGE_BYTES:
                    task.check = self._checker.submit(self._check_of(task))
                    return
            del self._fetching[device]
            if error is None:
                self._finish_check(task)
            elif isinstance(error, BadPayload):
                self._reject(task, result, str(error))
            else:
                raise error
            self.grant_uploads()

        return finished

    def _take_checked_uploads(self) -> None:
        """Continue with uploads whose check in a thread has finished."""
        for device, task in list(self._fetching.items()):
            if task.check is not None and task.check.done():
                del self._fetching[device]
                self._finish_check(task, task.check.result)
                self.grant_uploads()

    def _drop_upload(self, task: Task) -> None:
        """Stop fetching or checking the task's upload."""
        fetched = self._fetching.pop(task.device, None)
        self._waiting.pop(task.device, None)
        task.result = task.content = task.check = None
        task.deadline.interrupted()
        if fetched:
            self._exchange.cancel(task.device)

    def _check_of(self, task: Task) -> Callable[[], None]:
        """A function that checks the task's upload, and puts it into the run's mirror, in any thread; it raises
        BadPayload."""
        result, content, program = task.result, task.content, task.work.program
        assert result is not None  # only those get here
        assert result.upload is not None
        presence = self._state.presence
        hello = presence[task.device].hello if task.device in presence else None
        what = f"result of {task.device} for round {result.round}"
        blobs, digest, mirror = self._state.blobs, result.upload.digest, self._state.mirror
        upload = blobs.path(digest) if content is None else content

        def check() -> None:
            tensors = check_upload(upload, program, what)
            if LABELS in tensors and hello:
                check_labels(tensors[LABELS], program, hello, what)
            if mirror:
                if content is not None:
                    blobs.put(content)
                mirror([digest])

        return check

    def _finish_check(self, task: Task, check: Callable[[], None] | None = None) -> None:
        """The upload has arrived: check it, or take the outcome of `check` if it was checked in a thread."""
        result = task.result
        assert result is not None  # only those get here
        if why := self._too_late(result):
            self._reject(task, result, why, TaskState.LATE)
            return
        try:
            (check or self._check_of(task))()
        except BadPayload as bad:
            self._strike(task, result, str(bad))
        except Exception as error:
            if ends_run(error):
                raise
            self._errors.append((task.device, error))
        else:
            self._set_checked(task)

    # --- accepted ----------------------------------------------------------------------------------------

    def _set_checked(self, task: Task) -> None:
        task.to(TaskState.CHECKED)
        task.deadline.interrupted()
        if not self._checked:
            self._commit_at = time.monotonic() + BATCH_S
        self._checked[task.device] = task

    def commit(self, *, now: bool = False) -> None:
        """Store the checked results in one transaction, then acknowledge them. To be called after each batch of events.

        Unless `now` is set, results wait BATCH_S for others, except when the round is complete.
        """
        self._take_checked_uploads()
        if not self._checked or not (now or time.monotonic() >= self._commit_at or self._is_complete()):
            return
        batch, self._checked = list(self._checked.values()), {}
        self._write(batch)
        self._ended(batch, TaskState.ACCEPTED)
        for task in batch:
            try:
                self._accept(task)
            except Exception as error:
                if ends_run(error):
                    raise
                self._errors.append((task.device, error))

    def _write(self, batch: list[Task]) -> None:
        """Write first the uploads, then a note outside the record, then the record."""
        state = self._state
        with state.blobs.commit_together() as batched_commit:
            for task in batch:
                if task.content is not None:
                    batched_commit.put(task.content)
        used_in = {"train": state.counts_in, "evaluate": None}
        accepted = [(task.device, task.result, used_in[task.kind]) for task in batch if task.result]
        number, cohort, needed = state.counts_in, None, None
        if state.opened:
            number = state.opened.number
            noted = state.opened, len(state.opened.cohort)
            if state.opened.kind == "train" and self._noted != noted:  # once: it is as long as all results together
                cohort, needed = sorted(state.opened.cohort), state.opened.needed
                self._noted = noted
        self._backups.note(Accepted(number, cohort, needed, accepted))
        state.add_results(state.store.tasks.add_results(accepted, {task.device: task.times for task in batch}))

    def _accept(self, task: Task) -> None:
        """Acknowledge a result that is in the store, and update the round."""
        state, device, result = self._state, task.device, task.result
        assert result is not None  # it was checked
        if task.kind == "train":
            state.counted.add(device)
        if state.opened and device in state.opened.cohort and state.opened.kind == task.kind:
            state.opened.accept(device)
        state.presence.finished(device)
        self._profiles.learn(device, task.work.expected, result.use.broke, result.use)
        self._acknowledge(device, result)
        for what in result.damaged:
            state.refuse(device, "damage", what, result.round)
            state.operator_log(f"{device}: {what}")
        staleness = state.counts_in - result.round if task.kind == "train" else 0
        figures = {"round": result.round, "kind": result.kind, "samples": result.samples, "staleness": staleness}
        log.info("result accepted", extra={"device": device, **figures})

    def _is_complete(self) -> bool:
        """Whether the checked results complete the open round."""
        opened = self._state.opened
        if opened is None:
            return True
        answered = len(opened.accepted) + len(self._checked)
        return answered >= opened.needed or answered + len(opened.failed) >= len(opened.cohort)

    def _acknowledge(self, device: str, result: Result) -> None:
        self._state.send(device, ResultAck(result.run, result.round, result.kind, accepted=True))

    # --- refused ----------------------------------------------------------------------------------------

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
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _too_late(self, result: Result) -> str | None:
        """The reason why a result is too late for the round in which it would count; None if it is not."""
        config, counts_in = self._state.config, self._state.counts_in
        if result.kind == "evaluate" or result.round == counts_in:
            return None
        if counts_in > config.rounds:
            return f"late: round {result.round} is closed for train results, and it was the last one"
        staleness, most = counts_in - result.round, config.max_staleness
        if staleness > most:
            return f"late: made for round {result.round}, {staleness} rounds ago; at most {most} are allowed"
        return None

    def _refuse(self, device: str, result: Result, reason: str) -> None:
        """Answer with a refusal; the device's current task, if any, continues."""
        self._state.refuse(device, result.kind, reason, result.round)
        answer = ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason[:500])
        self._state.send(device, answer)

    def _reject(self, task: Task, result: Result, reason: str, end: TaskState = TaskState.FAILED) -> None:
        """Refuse the result of a task, which ends the task."""
        self._refuse(task.device, result, reason)
        self._state.operator_log(f"{task.device}: {result.kind} result of round {result.round} refused: {reason}")
        self._end_without_result(task, end)

    def _strike(self, task: Task, result: Result, reason: str) -> None:
        self._reject(task, result, reason)
        self._strikes.append(Strike(task.device, result.round, reason))

    # --- how tasks end ----------------------------------------------------------------------------------

    def give_up(self, task: Task, why: Missing, reason: str) -> None:
        """End a task whose device sent nothing in time; `reason` is text for the operator."""
        state = self._state
        if state.opened and state.opened.kind == task.kind:
            state.opened.fail(task.device, why)
        state.refuse(task.device, task.kind, reason, task.round, lost=True)
        self.dismiss([task], f"late: round {task.round} no longer waits for it", _GIVEN_UP[why])

    def dismiss(self, tasks: Iterable[Task], reason: str, end: TaskState = TaskState.CANCELLED) -> None:
        """Cancel tasks: neither side keeps anything of them. An announced upload is refused with the reason; a checked
        result still counts."""
        for task in tasks:
            self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason))
            if task.state is TaskState.CHECKED:
                self.commit(now=True)
                continue
            result = task.result
            self._drop_upload(task)
            self._end([task], end)
            if result:
                self._refuse(task.device, result, reason)
            self.grant_uploads()

    def fail(self, task: Task, reason: str) -> None:
        """End a task because of an error on this side."""
        self._checked.pop(task.device, None)
        self._drop_upload(task)
        self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason[:500]))
        self._end_without_result(task, TaskState.FAILED)

    def pause(self) -> None:
        """Forget the open round and its tasks; this process will reopen it and assign them again."""
        self._state.opened = None
        self._checked.clear()  # none of them was acknowledged
        for task in self._state.tasks:  # in the store they are still under way
            self._drop_upload(task)
            self._state.tasks.end(task, TaskState.CANCELLED)

    def close_round(self) -> None:
        """Close the open round; late results may still arrive if the run uses them."""
        self.commit(now=True)
        state = self._state
        opened, state.opened = state.opened, None
        if opened and opened.kind == "train":
            state.count_in(opened.number + 1)

    def _end_without_result(self, task: Task, end: TaskState) -> None:
        """End a task without a result that counts."""
        opened = self._state.opened
        if opened and opened.kind == task.kind:
            opened.fail(task.device, _MISSING[end])
        self._end([task], end)

    def _end(self, tasks: list[Task], end: TaskState) -> None:
        trained = [(task.round, task.device) for task in tasks if task.kind == "train"]
        self._state.store.tasks.end(self._state.run, trained, end, {task.device: task.times for task in tasks})
        self._ended(tasks, end)

    def _ended(self, tasks: list[Task], end: TaskState) -> None:
        """Update the tasks in memory; the record has been updated already."""
        for task in tasks:
            self._state.tasks.end(task, end)
            task.content = None  # an ended task may stay in memory until its deadline
            self._freed.append(task.device)


def _window_of(task: Task) -> int:
    """Most chunks of the task's upload that are in flight."""
    upload = task.result.upload if task.result else None
    return min(upload.chunks, WINDOW_CHUNKS) if upload else 0
