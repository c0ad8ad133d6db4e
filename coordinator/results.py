"""Results as they come in: fetched, checked, kept, and answered exactly once with yes or no."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from coordinator.admission import LABELS, check_labels, check_result, check_room, check_upload
from coordinator.backups import Accepted
from coordinator.config import RunConfig
from coordinator.deadlines import Links
from coordinator.open_round import OpenRound
from coordinator.presence import Presence
from coordinator.store import Store
from coordinator.work import Assignment, Assignments
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import BadPayload
from fedvit.resources import BudgetKind
from fedvit.transport.exchange import LARGE_BYTES, BlobExchange
from fedvit.wire.messages import Declined, Failed, Manifest, Result, ResultAck
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import WINDOW_CHUNKS
from profiles.probes.host import free_disk_bytes

log = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4 * WINDOW_CHUNKS
"""Chunks of uploads that may be under way at the same time, so that a cohort cannot overrun the broker's queues: four
large uploads with full windows, or as many more as are small."""

GATHER_S = 0.05
"""Longest wait of a result for others that are put into the store with it."""
REFUSALS_KEPT = 2000
"""Of one device, written down by one process: more would let it fill the disk, and tell nobody anything new."""


class Answer(NamedTuple):
    """A result, and the task that it is the result of."""

    assignment: Assignment
    result: Result
    content: bytes | None = None  # of the upload, where it came inside the message and is not on the disk yet


class Results:
    """The desk for one run's results; `opened` is the round that is being asked, None between rounds.

    A device may bring what it was assigned. What comes for the round that is open counts in it; what comes later
    counts in the round that is open then (`counts_in`), where the run uses late results, and is refused elsewhere.
    `strike(device, round, reason)` hears of results that no honest device brings; `note(accepted)` keeps what was
    accepted apart from the store, before it is in there.
    Idempotent by (run, round, kind, device). Whatever is refused is counted in the store, answered with the
    reason, and never fatal. `released(device)` hears that a device is free for its next task.
    """

    def __init__(
        self,
        *,
        run: str,
        config: RunConfig,
        store: Store,
        blobs: BlobStore,
        exchange: BlobExchange,
        topics: Topics,
        presence: Presence,
        assignments: Assignments,
        answer: Callable[[str, ResultAck], None],
        released: Callable[[str], None],
        say: Callable[[str], None],
        strike: Callable[[str, int, str], None],
        note: Callable[[Accepted], None],
    ) -> None:
        self.opened: OpenRound | None = None
        self.counts_in = 1  # the round whose server step takes what is accepted now
        self.counted: set[str] = set()  # devices with a result for that round: each counts once in it
        self.links = Links()
        self._run = run
        self._config = config
        self._store = store
        self._blobs = blobs
        self._exchange = exchange
        self._topics = topics
        self._presence = presence
        self._assignments = assignments
        self._answer = answer
        self._released = released
        self._say = say
        self._queue: dict[str, Answer] = {}  # by device: uploads that wait for their turn, in the order they came
        self._under_way: dict[str, Answer] = {}  # uploads that are being fetched
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="upload-check")
        self._checking: dict[str, tuple[Answer, Future[None]]] = {}  # large ones, of those that are under way
        self._checked: dict[str, Answer] = {}  # good, not in the store yet
        self._keep_at = 0.0  # when they have waited long enough for others
        self._refused: Counter[str] = Counter()  # by device
        self._strike = strike
        self._note = note

    # --- the round --------------------------------------------------------------------------------------

    def open(self, opened: OpenRound) -> None:
        """From now on results are for this round. What the store has of it is accepted already."""
        self.opened = opened
        if opened.kind == "train":
            self.count_in(opened.number)
        opened.accepted |= self._store.answered(self._run, opened.number, opened.kind).intersection(opened.cohort)

    def count_in(self, number: int) -> None:
        """Training results are for the server step of this round from now on."""
        self.counts_in = number
        self.counted = self._store.counted(self._run, number)

    def close(self) -> None:
        """The round is over; what was assigned for it and is not late beyond use may still come."""
        self.keep(now=True)
        opened, self.opened = self.opened, None
        if opened and opened.kind == "train":
            self.count_in(opened.number + 1)

    def pause(self) -> None:
        """The round will be opened again by this process: what is under way is begun anew then."""
        self.opened = None
        self._checked.clear()  # nothing of it was acknowledged
        self._queue.clear()
        for device in list(self._under_way):
            del self._under_way[device]
            self._exchange.cancel(device)
        for assignment in self._assignments:
            self._assignments.end(assignment.device)

    def cancel(self, assignment: Assignment, reason: str, outcome: str = "cancelled") -> None:
        """A task's result is not wanted any more; an upload that is announced already is refused as late."""
        device = assignment.device
        if device in self._checked:
            self.keep(now=True)
            return
        announced = self._under_way.pop(device, None) or self._queue.pop(device, None)
        self._end([assignment], outcome)
        if announced:
            self._exchange.cancel(device)
            self._reject(device, announced.result, reason)
            self.grant_uploads()

    # --- what devices say -------------------------------------------------------------------------------

    def on_result(self, device: str, result: Result) -> None:
        """Take a result, or refuse it; one that was taken before is only acknowledged again."""
        assignment = self._assignments.meant(device, result)
        if result.run != self._run:
            # a run that was interrupted may be resumed: the device keeps its result till then
            if not self._store.is_unfinished(result.run):
                self._reject(device, result, f"run {result.run!r} is not served here, this is {self._run!r}")
        elif assignment is None:
            if self._store.has_result(self._run, result.round, result.kind, device):
                self._acknowledge(device, result)
            elif reason := self._why_never(device, result):
                self._reject(device, result, reason)
            # else its round will be opened again, by this process after a restart: the device keeps it till then
        elif device in self._checked or self.is_uploading(device) or not self._presence.is_online(device):
            return  # the answer will follow, at the latest when the device has said hello
        elif why := self._too_late(result):
            self._reject(device, result, why)
        else:
            try:
                check_result(result, assignment.work.program, self._presence[device].hello)
            except BadPayload as error:
                self._reject(device, result, str(error))
                self._strike(device, result.round, str(error))
                return
            if result.upload is None:
                self._accept(Answer(assignment, result))
            elif result.inline:
                self._take_inline(assignment, result)
            else:
                self._await_upload(Answer(assignment, result), result.upload)

    def _await_upload(self, answer: Answer, upload: Manifest) -> None:
        """Fetch it when it is its turn, if there is room for it."""
        device = answer.assignment.device
        try:
            check_room(upload, free_disk_bytes(self._blobs.folder))
        except BadPayload as error:
            self._reject(device, answer.result, str(error))
            return
        self._queue[device] = answer
        self.grant_uploads()

    def _take_inline(self, assignment: Assignment, result: Result) -> None:
        """The upload came with the result."""
        device, content = assignment.device, result.inline
        result = msgspec.structs.replace(result, inline=b"")
        assert result.upload is not None  # asked for by the caller
        if digest_of(content) != result.upload.digest:
            reason = f"the upload of {len(content)} bytes has digest {digest_of(content)}"
            self._reject(device, result, f"{reason}, expected {result.upload.digest}")
            return
        self._take(Answer(assignment, result, content))

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device says that it cannot do its task; it repeats that until it is answered."""
        self._answer(device, ResultAck(failed.run, failed.round, failed.kind, accepted=False))
        self.refuse(device, failed.kind, failed.reason, failed.round, failed.broke)
        if failed.run == self._run and (assignment := self._assignments.meant(device, failed)):
            self._lose(assignment, failed.reason, "failed")
            self._say(f"{device} cannot {failed.kind} in round {failed.round}: {failed.reason}")

    def on_declined(self, device: str, declined: Declined) -> None:
        """A device does not work now: it is left out without blame, and asked again when it said."""
        self._answer(device, ResultAck(declined.run, declined.round, declined.kind, accepted=False))
        if declined.run != self._run or not (assignment := self._assignments.meant(device, declined)):
            return
        reason = f"{declined.reason[:200]}; asked again in {declined.again_s:.0f} s"
        self._store.add_refusal(self._run, declined.round, device, "declined", reason, None)
        self._presence.rest(device, declined.reason, declined.again_s)
        if self.opened and self.opened.waits_for(device):
            self.opened.declined.add(device)
        self._lose(assignment, f"declined: {declined.reason}", "declined")
        self._say(f"{device} declines to {declined.kind} in round {declined.round}: {reason}")

    def device_left(self, device: str) -> None:
        """It may come back; what it was sending is begun anew then."""
        self._under_way.pop(device, None)
        self._queue.pop(device, None)
        if assignment := self._assignments.of(device):
            assignment.progress = None
        self.grant_uploads()

    # --- uploads ----------------------------------------------------------------------------------------

    def is_uploading(self, device: str) -> bool:
        return device in self._under_way or device in self._queue

    def uploading(self) -> set[str]:
        return {*self._under_way, *self._queue}

    def waits_for_its_turn(self, device: str) -> bool:
        """Whether it is this side that keeps the device waiting."""
        return device in self._queue

    def grant_uploads(self) -> None:
        """Fetch waiting uploads, a few at a time."""
        chunks = sum(window_of(announced.result.upload) for announced in self._under_way.values())
        while self._queue:
            device, announced = next(iter(self._queue.items()))
            result = announced.result
            assert result.upload is not None  # only those are queued
            chunks += window_of(result.upload)
            if self._under_way and chunks > CHUNKS_AT_ONCE:
                return
            self._under_way[device] = self._queue.pop(device)
            topic = self._topics.upload(device, result.upload.digest)
            self._exchange.fetch(result.upload, device, topic, self._upload_finished(announced))

    def _upload_finished(self, announced: Answer) -> Callable[[Manifest, Exception | None], None]:
        assignment, result = announced.assignment, announced.result
        device, began = assignment.device, time.monotonic()

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if self._under_way.get(device) is not announced:
                return  # it left, or is not wanted any more
            if error is None:
                self.links.measured(device, manifest.size, time.monotonic() - began)
                if manifest.size >= LARGE_BYTES:  # looked at while messages and other uploads come
                    self._checking[device] = announced, self._checker.submit(self._check_of(announced))
                    return
            del self._under_way[device]
            if error is None:
                self._take(announced)
            elif isinstance(error, BadPayload):
                self._reject(device, result, str(error))
            else:
                raise error
            self.grant_uploads()

        return finished

    def _take_checked(self) -> None:
        """Large uploads that were looked at."""
        for device, (answer, check) in list(self._checking.items()):
            if check.done():
                del self._checking[device]
                if self._under_way.get(device) is answer:  # else it left, or is not wanted any more
                    del self._under_way[device]
                    self._take(answer, check.result)
                    self.grant_uploads()

    def _check_of(self, answer: Answer) -> Callable[[], None]:
        """What looks at an upload, in any thread. It raises BadPayload."""
        assignment, result, content = answer
        assert result.upload is not None  # only those get here
        device, program = assignment.device, assignment.work.program
        hello = self._presence[device].hello if device in self._presence else None
        what = f"result of {device} for round {result.round}"
        upload = self._blobs.path(result.upload.digest) if content is None else content

        def check() -> None:
            tensors = check_upload(upload, program, what)
            if LABELS in tensors and hello:
                check_labels(tensors[LABELS], program, hello, what)

        return check

    def _take(self, answer: Answer, check: Callable[[], None] | None = None) -> None:
        """The upload is here: see whether it is good, by `check` where it was looked at before."""
        device, result = answer.assignment.device, answer.result
        if why := self._too_late(result):
            self._reject(device, result, why)
            return
        try:
            (check or self._check_of(answer))()
        except BadPayload as bad:
            self._reject(device, result, str(bad))
            self._strike(device, result.round, str(bad))
        else:
            self._accept(answer)

    # --- yes and no -------------------------------------------------------------------------------------

    def refuse(
        self,
        device: str,
        kind: str,
        reason: str,
        round_number: int | None = None,
        broke: BudgetKind | None = None,
    ) -> None:
        """Count something that was not accepted; `broke`: because of a budget of the device."""
        self._refused[device] += 1
        if self._refused[device] > REFUSALS_KEPT:
            return
        if self._refused[device] == REFUSALS_KEPT:
            reason = f"{reason[:400]} (the last one of this device that is written down)"
        number = round_number if round_number is not None else (self.opened.number if self.opened else None)
        self._store.add_refusal(self._run, number, device, kind, reason, broke)
        log.warning("refused", extra={"device": device, "kind": kind, "reason": reason})

    def _why_never(self, device: str, result: Result) -> str | None:
        """Why a result that is not assigned can never count; None when it still may."""
        record = self._store.round(self._run, result.round)
        if record is None:
            return f"round {result.round} was never asked"
        if self.opened and self.opened.asked(result):
            if device not in self.opened.cohort:
                return f"{device} was not asked in round {result.round}"
            late = self.opened.failed.get(device) in ("deadline", "offline")
            return f"late: round {result.round} does not wait for it any more" if late else None
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _too_late(self, result: Result) -> str | None:
        """Why a result was made from a state that is too old for the round it would count in; None when it was not."""
        if result.kind == "evaluate" or result.round == self.counts_in:
            return None
        if self.counts_in > self._config.rounds:
            return f"late: round {result.round} is closed for train results, and no other follows"
        staleness, most = self.counts_in - result.round, self._config.max_staleness
        if staleness > most:
            return f"late: made for round {result.round}, {staleness} rounds ago; at most {most} are allowed"
        return None

    def _accept(self, answer: Answer) -> None:
        if not self._checked:
            self._keep_at = time.monotonic() + GATHER_S
        self._checked[answer.assignment.device] = answer

    def keep(self, *, now: bool = False) -> None:
        """Put what was checked into the store, then acknowledge it. To be called when what arrived was handled.

        Unless it has to be `now`, a result waits a moment for others that may come; not where the round is complete.
        """
        self._take_checked()
        if not self._checked or not (now or time.monotonic() >= self._keep_at or self._is_complete()):
            return
        kept, self._checked = list(self._checked.values()), {}
        with self._blobs.gathering() as gathering:
            for answer in kept:
                if answer.content is not None:
                    gathering.put(answer.content)
        used_in = {"train": self.counts_in, "evaluate": None}
        accepted = [(answer.assignment.device, answer.result, used_in[answer.result.kind]) for answer in kept]
        number, cohort, needed = self.counts_in, None, None
        if self.opened:
            number = self.opened.number
            if self.opened.kind == "train":
                cohort, needed = self.opened.cohort, self.opened.needed
        self._note(Accepted(number, cohort, needed, accepted))
        self._store.add_results(accepted)
        self._end([answer.assignment for answer in kept], "accepted")
        for assignment, result, _ in kept:
            device = assignment.device
            if result.kind == "train":
                self.counted.add(device)
            if self.opened and device in self.opened.cohort and self.opened.kind == result.kind:
                self.opened.accept(device)
            self._acknowledge(device, result)
            for what in result.damaged:
                self.refuse(device, "damage", what, result.round)
                self._say(f"{device}: {what}")
            log.info(
                "result accepted",
                extra={
                    "device": device, "round": result.round, "kind": result.kind, "samples": result.samples,
                    "staleness": (used_in[result.kind] or result.round) - result.round,
                },
            )  # fmt: skip
            self._released(device)

    def _is_complete(self) -> bool:
        """Whether with what was checked the open round has all that it waits for."""
        opened = self.opened
        if opened is None:
            return True
        answered = len(opened.accepted) + len(self._checked)
        return answered >= opened.needed or answered + len(opened.failed) >= len(opened.cohort)

    def _acknowledge(self, device: str, result: Result) -> None:
        self._answer(device, ResultAck(result.run, result.round, result.kind, accepted=True))

    def _reject(self, device: str, result: Result, reason: str) -> None:
        self.refuse(device, result.kind, reason, result.round)
        self._answer(device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason[:500]))
        if result.run == self._run and (assignment := self._assignments.meant(device, result)):
            self._say(f"{device}: {result.kind} result of round {result.round} refused: {reason}")
            self._lose(assignment, reason, "failed")

    def _lose(self, assignment: Assignment, reason: str, outcome: str) -> None:
        """The device brings nothing that counts."""
        if self.opened and self.opened.kind == assignment.kind:
            self.opened.fail(assignment.device, reason)
        self._end([assignment], outcome)
        self._released(assignment.device)

    def _end(self, assignments: list[Assignment], outcome: str) -> None:
        trained = [(one.round, one.device) for one in assignments if one.kind == "train"]
        self._store.end_tasks(self._run, trained, outcome)
        for assignment in assignments:
            if self._assignments.of(assignment.device) is assignment:
                self._assignments.end(assignment.device)


def window_of(upload: Manifest | None) -> int:
    """Chunks of an upload that are under way at most."""
    return min(upload.chunks, WINDOW_CHUNKS) if upload else 0
