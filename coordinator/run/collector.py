"""Results as they come in: fetched, checked, kept, and answered exactly once with yes or no. And how tasks end."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from coordinator.record.backups import Accepted, Backups
from coordinator.run.device_profiles import DeviceProfiles
from coordinator.run.isolation import ends_run
from coordinator.run.open_round import Missing
from coordinator.run.state import RunState
from coordinator.run.tasks import Task, TaskState
from coordinator.run.validation import check_labels, check_result, check_room, check_upload
from fedvit.blobs import digest_of
from fedvit.errors import BadPayload
from fedvit.program import LABELS
from fedvit.transport.exchange import LARGE_BYTES, BlobExchange
from fedvit.wire.messages import Cancel, Declined, Failed, Manifest, Result, ResultAck
from fedvit.wire.transfer import WINDOW_CHUNKS
from profiles.probes.host import free_disk_bytes

log = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4 * WINDOW_CHUNKS
"""Chunks of uploads that may be under way at the same time, so that a cohort cannot overrun the broker's queues: four
large uploads with full windows, or as many more as are small."""

GATHER_S = 0.05
"""Longest wait of a result for others that are put into the store with it."""

_MISSING = {
    TaskState.DECLINED: Missing.DECLINED,
    TaskState.FAILED: Missing.FAILED,
    TaskState.LATE: Missing.FAILED,
}


class Strike(NamedTuple):
    """A result that no honest device brings."""

    device: str
    round: int
    reason: str


class ResultCollector:
    """One run's.

    A device may bring what it was given. What comes for the round that is open counts in it; what comes later counts
    in the round that is open then (`RunState.counts_in`), where the run uses late results, and is refused elsewhere.
    Idempotent by (run, round, kind, device). Whatever is refused is counted in the store, answered with the reason,
    and never fatal. What follows from it for others is asked for with `take_freed`, `take_strikes`, `take_to_tell`.
    """

    def __init__(self, state: RunState, exchange: BlobExchange, backups: Backups, profiles: DeviceProfiles) -> None:
        self._state = state
        self._exchange = exchange
        self._backups = backups
        self._profiles = profiles
        self._waiting: dict[str, Task] = {}  # uploads that wait for their turn, in the order they came
        self._fetching: dict[str, Task] = {}  # uploads that are being fetched, or looked at
        self._checked: dict[str, Task] = {}  # good, not in the store yet
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="upload-check")
        self._keep_at = 0.0  # when what is checked has waited long enough for others
        self._freed: list[str] = []
        self._strikes: list[Strike] = []
        self._to_tell: list[Task] = []
        self._errors: list[tuple[str, Exception]] = []

    # --- what follows -----------------------------------------------------------------------------------

    def take_freed(self) -> list[str]:
        """Devices whose task has ended since this was asked last."""
        freed, self._freed = self._freed, []
        return freed

    def take_strikes(self) -> list[Strike]:
        strikes, self._strikes = self._strikes, []
        return strikes

    def take_errors(self) -> list[tuple[str, Exception]]:
        """Faults of ours with the results of devices."""
        errors, self._errors = self._errors, []
        return errors

    def take_to_tell(self) -> list[Task]:
        """Tasks that devices brought something else for: they are to be told again."""
        tasks, self._to_tell = self._to_tell, []
        return tasks

    # --- what devices say -------------------------------------------------------------------------------

    def on_result(self, device: str, result: Result) -> None:
        """Take a result, or refuse it; one that was taken before is only acknowledged again."""
        state = self._state
        task = state.tasks.meant(device, result)
        if result.run != state.run:
            self._answer_other_run(device, result)
        elif task is None:
            if state.store.has_result(state.run, result.round, result.kind, device):
                self._acknowledge(device, result)
            elif reason := self._why_never(device, result):
                self._refuse(device, result, reason)
            # else its round will be opened again, by this process after a restart: the device keeps it till then
        elif task.state in (TaskState.UPLOADING, TaskState.CHECKED) or not state.presence.is_online(device):
            return  # the answer will follow, at the latest when the device has said hello
        elif not task.is_same(result) or result.program not in ("", task.work.digest):
            # no fault of the device: what is asked has changed since
            self._refuse(device, result, f"it is of task {result.task}, asked is {task.id}: the device is told again")
            self._to_tell.append(task)
        elif why := self._too_late(result):
            self._reject(task, result, why, TaskState.LATE)
        else:
            self._take_in(task, result)

    def _take_in(self, task: Task, result: Result) -> None:
        """A result that may count."""
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
        """A result of a run that ended is not wanted; any other may yet be resumed, here or elsewhere: the device keeps
        it, and sends it when it is welcomed anew."""
        state = self._state
        if state.store.has_ended(result.run):
            self._refuse(device, result, f"run {result.run!r} has ended")
        else:
            reason = f"run {result.run!r} is not served here now, this is {state.run!r}"
            state.send(
                device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason, keep=True)
            )

    def _await_upload(self, task: Task, result: Result, upload: Manifest) -> None:
        """Fetch it when it is its turn, if there is room for it."""
        try:
            check_room(upload, free_disk_bytes(self._state.blobs.folder))
        except BadPayload as error:
            self._reject(task, result, str(error))
            return
        task.to(TaskState.UPLOADING)
        self._waiting[task.device] = task
        self.grant_uploads()

    def _take_inline(self, task: Task, result: Result) -> None:
        """The upload came with the result."""
        content = result.inline
        task.result = result = msgspec.structs.replace(result, inline=b"")
        assert result.upload is not None  # asked for by the caller
        if digest_of(content) != result.upload.digest:
            reason = f"the upload of {len(content)} bytes has digest {digest_of(content)}"
            self._reject(task, result, f"{reason}, expected {result.upload.digest}")
            return
        task.content = content
        self._take(task)

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device says that it cannot do its task; it repeats that until it is answered."""
        state = self._state
        state.refuse(device, failed.kind, failed.reason, failed.round, failed.broke)
        state.send(device, ResultAck(failed.run, failed.round, failed.kind, accepted=False))
        task = state.tasks.meant(device, failed)
        if task and task.is_same(failed) and task.state is not TaskState.CHECKED:
            self._profiles.learn(device, task.work.expected, (failed.broke,) if failed.broke else (), failed.use)
            self._leave_upload(task)
            self._lose(task, TaskState.FAILED)
            state.say(f"{device} cannot {failed.kind} in round {failed.round}: {failed.reason}")

    def on_declined(self, device: str, declined: Declined) -> None:
        """A device does not work now: it is left out without blame, and asked again when it said."""
        state = self._state
        state.send(device, ResultAck(declined.run, declined.round, declined.kind, accepted=False))
        task = state.tasks.meant(device, declined)
        if task is None or not task.is_same(declined) or task.state in (TaskState.UPLOADING, TaskState.CHECKED):
            return
        reason = f"{declined.reason[:200]}; asked again in {declined.again_s:.0f} s"
        state.store.add_refusal(state.run, declined.round, device, "declined", reason, None)
        state.presence.rest(device, declined.reason, declined.again_s)
        self._lose(task, TaskState.DECLINED)
        state.say(f"{device} declines to {declined.kind} in round {declined.round}: {reason}")

    def device_left(self, device: str) -> None:
        """It may come back; what it was sending is begun anew then."""
        if task := self._state.tasks.of(device):
            task.progress = None
            if task.state is TaskState.UPLOADING:
                self._leave_upload(task)
                task.to(TaskState.OFFERED)
        self.grant_uploads()

    # --- uploads ----------------------------------------------------------------------------------------

    def waiting(self) -> set[str]:
        """Devices that this side keeps waiting for the turn of their uploads."""
        return set(self._waiting)

    def uploads(self) -> list[Task]:
        """Tasks whose uploads are fetched or wait for their turn."""
        return [*self._fetching.values(), *self._waiting.values()]

    def grant_uploads(self) -> None:
        """Fetch waiting uploads, a few at a time."""
        chunks = sum(map(_window_of, self._fetching.values()))
        while self._waiting:
            device, task = next(iter(self._waiting.items()))
            assert task.result is not None  # only those are queued
            assert task.result.upload is not None
            chunks += _window_of(task)
            if self._fetching and chunks > CHUNKS_AT_ONCE:
                return
            self._fetching[device] = self._waiting.pop(device)
            upload = task.result.upload
            topic = self._state.topics.upload(device, upload.digest)
            self._exchange.fetch(upload, device, topic, self._upload_finished(task, task.result))

    def _upload_finished(self, task: Task, result: Result) -> Callable[[Manifest, Exception | None], None]:
        device, began = task.device, time.monotonic()

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if self._fetching.get(device) is not task or task.result is not result:
                return  # it left, or is not wanted any more
            if error is None:
                self._state.links.measured(device, manifest.size, time.monotonic() - began)
                if manifest.size >= LARGE_BYTES:  # looked at while messages and other uploads come
                    task.check = self._checker.submit(self._check_of(task))
                    return
            del self._fetching[device]
            if error is None:
                self._take(task)
            elif isinstance(error, BadPayload):
                self._reject(task, result, str(error))
            else:
                raise error
            self.grant_uploads()

        return finished

    def _take_looked_at(self) -> None:
        """Large uploads that were looked at."""
        for device, task in list(self._fetching.items()):
            if task.check is not None and task.check.done():
                del self._fetching[device]
                self._take(task, task.check.result)
                self.grant_uploads()

    def _leave_upload(self, task: Task) -> None:
        """What is under way of it is not fetched any more."""
        fetched = self._fetching.pop(task.device, None)
        self._waiting.pop(task.device, None)
        task.result = task.content = task.check = None
        task.deadline.interrupted()
        if fetched:
            self._exchange.cancel(task.device)

    def _check_of(self, task: Task) -> Callable[[], None]:
        """What looks at an upload, in any thread. It raises BadPayload."""
        result, content, program = task.result, task.content, task.work.program
        assert result is not None  # only those get here
        assert result.upload is not None
        presence = self._state.presence
        hello = presence[task.device].hello if task.device in presence else None
        what = f"result of {task.device} for round {result.round}"
        upload = self._state.blobs.path(result.upload.digest) if content is None else content

        def check() -> None:
            tensors = check_upload(upload, program, what)
            if LABELS in tensors and hello:
                check_labels(tensors[LABELS], program, hello, what)

        return check

    def _take(self, task: Task, check: Callable[[], None] | None = None) -> None:
        """The upload is here: see whether it is good, by `check` where it was looked at before."""
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

    # --- yes --------------------------------------------------------------------------------------------

    def _set_checked(self, task: Task) -> None:
        task.to(TaskState.CHECKED)
        task.deadline.interrupted()
        if not self._checked:
            self._keep_at = time.monotonic() + GATHER_S
        self._checked[task.device] = task

    def keep(self, *, now: bool = False) -> None:
        """Put what was checked into the store, then acknowledge it. To be called when what arrived was handled.

        Unless it has to be `now`, a result waits a moment for others that may come; not where the round is complete.
        """
        self._take_looked_at()
        if not self._checked or not (now or time.monotonic() >= self._keep_at or self._is_complete()):
            return
        kept, self._checked = list(self._checked.values()), {}
        self._write(kept)
        self._ended(kept, TaskState.ACCEPTED)
        for task in kept:
            try:
                self._accept(task)
            except Exception as error:
                if ends_run(error):
                    raise
                self._errors.append((task.device, error))

    def _write(self, kept: list[Task]) -> None:
        """First the uploads, then a note apart from the record, then the record."""
        state = self._state
        with state.blobs.batched_commit() as batched_commit:
            for task in kept:
                if task.content is not None:
                    batched_commit.put(task.content)
        used_in = {"train": state.counts_in, "evaluate": None}
        accepted = [(task.device, task.result, used_in[task.kind]) for task in kept if task.result]
        number, cohort, needed = state.counts_in, None, None
        if state.opened:
            number = state.opened.number
            if state.opened.kind == "train":
                cohort, needed = sorted(state.opened.cohort), state.opened.needed
        self._backups.note(Accepted(number, cohort, needed, accepted))
        state.store.add_results(accepted)

    def _accept(self, task: Task) -> None:
        """It is in the store."""
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
            state.say(f"{device}: {what}")
        staleness = state.counts_in - result.round if task.kind == "train" else 0
        figures = {"round": result.round, "kind": result.kind, "samples": result.samples, "staleness": staleness}
        log.info("result accepted", extra={"device": device, **figures})

    def _is_complete(self) -> bool:
        """Whether with what was checked the open round has all that it waits for."""
        opened = self._state.opened
        if opened is None:
            return True
        answered = len(opened.accepted) + len(self._checked)
        return answered >= opened.needed or answered + len(opened.failed) >= len(opened.cohort)

    def _acknowledge(self, device: str, result: Result) -> None:
        self._state.send(device, ResultAck(result.run, result.round, result.kind, accepted=True))

    # --- no ---------------------------------------------------------------------------------------------

    def _why_never(self, device: str, result: Result) -> str | None:
        """Why a result that belongs to no task can never count; None when it still may."""
        state = self._state
        record = state.store.round(state.run, result.round)
        if record is None:
            return f"round {result.round} was never asked"
        if state.opened and state.opened.asked(result):
            if device not in state.opened.cohort:
                return f"{device} was not asked in round {result.round}"
            late = state.opened.failed.get(device) in (Missing.DEADLINE, Missing.OFFLINE, Missing.CRASHED)
            return f"late: round {result.round} does not wait for it any more" if late else None
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _too_late(self, result: Result) -> str | None:
        """Why a result was made from a state that is too old for the round it would count in; None when it was not."""
        config, counts_in = self._state.config, self._state.counts_in
        if result.kind == "evaluate" or result.round == counts_in:
            return None
        if counts_in > config.rounds:
            return f"late: round {result.round} is closed for train results, and no other follows"
        staleness, most = counts_in - result.round, config.max_staleness
        if staleness > most:
            return f"late: made for round {result.round}, {staleness} rounds ago; at most {most} are allowed"
        return None

    def _refuse(self, device: str, result: Result, reason: str) -> None:
        """The device is answered no; a task that it has goes on."""
        self._state.refuse(device, result.kind, reason, result.round)
        answer = ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason[:500])
        self._state.send(device, answer)

    def _reject(self, task: Task, result: Result, reason: str, end: TaskState = TaskState.FAILED) -> None:
        """The result of a task does not count, and the task ends with it."""
        self._refuse(task.device, result, reason)
        self._state.say(f"{task.device}: {result.kind} result of round {result.round} refused: {reason}")
        self._lose(task, end)

    def _strike(self, task: Task, result: Result, reason: str) -> None:
        self._reject(task, result, reason)
        self._strikes.append(Strike(task.device, result.round, reason))

    # --- how tasks end ----------------------------------------------------------------------------------

    def give_up(self, task: Task, why: Missing, reason: str) -> None:
        """Its device brought nothing in time; `reason` is for people."""
        state = self._state
        if state.opened and state.opened.kind == task.kind:
            state.opened.fail(task.device, why)
        state.refuse(task.device, task.kind, reason, task.round, lost=True)
        self.dismiss([task], f"late: round {task.round} does not wait for it any more", TaskState.LOST)

    def dismiss(self, tasks: Iterable[Task], reason: str, end: TaskState = TaskState.CANCELLED) -> None:
        """Devices need not go on: nothing of their task is kept, here or there. An upload that is announced already is
        refused with the reason; a result that was checked counts."""
        for task in tasks:
            self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason))
            if task.state is TaskState.CHECKED:
                self.keep(now=True)
                continue
            result = task.result
            self._leave_upload(task)
            self._end([task], end)
            if result:
                self._refuse(task.device, result, reason)
            self.grant_uploads()

    def fail(self, task: Task, reason: str) -> None:
        """The task ends because of a fault on this side."""
        self._checked.pop(task.device, None)
        self._leave_upload(task)
        self._state.send(task.device, Cancel(task.run, task.round, task.kind, reason[:500]))
        self._lose(task, TaskState.FAILED)

    def pause(self) -> None:
        """The round will be opened again by this process: what is under way is begun anew then."""
        self._state.opened = None
        self._checked.clear()  # nothing of it was acknowledged
        for task in self._state.tasks:  # to the store they are still under way
            self._leave_upload(task)
            self._state.tasks.end(task, TaskState.CANCELLED)

    def close_round(self) -> None:
        """The round is over; what was given for it and is not late beyond use may still come."""
        self.keep(now=True)
        state = self._state
        opened, state.opened = state.opened, None
        if opened and opened.kind == "train":
            state.count_in(opened.number + 1)

    def _lose(self, task: Task, end: TaskState) -> None:
        """The device brings nothing that counts."""
        opened = self._state.opened
        if opened and opened.kind == task.kind:
            opened.fail(task.device, _MISSING[end])
        self._end([task], end)

    def _end(self, tasks: list[Task], end: TaskState) -> None:
        trained = [(task.round, task.device) for task in tasks if task.kind == "train"]
        self._state.store.end_tasks(self._state.run, trained, end)
        self._ended(tasks, end)

    def _ended(self, tasks: list[Task], end: TaskState) -> None:
        """The record has it already."""
        for task in tasks:
            self._state.tasks.end(task, end)
            self._freed.append(task.device)


def _window_of(task: Task) -> int:
    """Chunks of its upload that are under way at most."""
    upload = task.result.upload if task.result else None
    return min(upload.chunks, WINDOW_CHUNKS) if upload else 0
