"""Results as they come in: fetched, checked, kept, and answered exactly once with yes or no."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from coordinator.admission import check_result, check_upload
from coordinator.config import RunConfig
from coordinator.deadlines import Links
from coordinator.open_round import OpenRound
from coordinator.presence import Presence
from coordinator.store import Store
from coordinator.work import Assignment, Assignments
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.resources import BudgetKind
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Declined, Failed, Manifest, Result, ResultAck
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

UPLOADS_AT_ONCE = 4
"""Uploads granted at the same time, so that a cohort cannot overrun the broker's queues."""


class Announced(NamedTuple):
    """A result whose upload is waited for."""

    assignment: Assignment
    result: Result


class Results:
    """The desk for one run's results; `opened` is the round that is being asked, None between rounds.

    A device may bring what it was assigned. What comes for the round that is open counts in it; what comes later
    counts in the round that is open then (`counts_in`), where the run uses late results, and is refused elsewhere.
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
        self._queue: deque[Announced] = deque()  # uploads that wait for their turn
        self._under_way: dict[str, Announced] = {}  # uploads that are being fetched

    # --- the round --------------------------------------------------------------------------------------

    def open(self, opened: OpenRound) -> None:
        """From now on results are for this round. What the store has of it is accepted already."""
        self.opened = opened
        if opened.kind == "train":
            self.count_in(opened.number)
        stored = self._store.results(self._run, opened.number, opened.kind)
        opened.accepted |= {result.device for result in stored if result.device in opened.cohort}

    def count_in(self, number: int) -> None:
        """Training results are for the server step of this round from now on."""
        self.counts_in = number
        waiting = self._store.results_from(self._run, number)
        self.counted = {result.device for result in waiting if result.used_in == number}

    def close(self) -> None:
        """The round is over; what was assigned for it and is not late beyond use may still come."""
        opened, self.opened = self.opened, None
        if opened and opened.kind == "train":
            self.count_in(opened.number + 1)

    def cancel(self, assignment: Assignment, reason: str, outcome: str = "cancelled") -> None:
        """A task's result is not wanted any more; an upload that is announced already is refused as late."""
        device = assignment.device
        announced = self._under_way.pop(device, None)
        announced = announced or next((one for one in self._queue if one.assignment.device == device), None)
        self._queue = deque(one for one in self._queue if one.assignment.device != device)
        self._end(assignment, outcome)
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
            if not any(record.id == result.run and record.status != "finished" for record in self._store.runs()):
                self._reject(device, result, f"run {result.run!r} is not served here, this is {self._run!r}")
        elif any(kept.device == device for kept in self._store.results(self._run, result.round, result.kind)):
            self._acknowledge(device, result)
        elif assignment is None:
            if reason := self._why_never(device, result):
                self._reject(device, result, reason)
            # else its round will be opened again, by this process after a restart: the device keeps it till then
        elif self.is_uploading(device) or not self._presence.is_online(device):
            return  # the answer will follow, at the latest when the device has said hello
        else:
            try:
                self._check_staleness(result)
                check_result(result, assignment.work.variant.program, self._presence[device].hello)
            except BadPayload as error:
                self._reject(device, result, str(error))
                return
            if result.upload is None:
                self._accept(assignment, result)
            else:
                self._queue.append(Announced(assignment, result))
                self.grant_uploads()

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device says that it cannot do its task."""
        self.refuse(device, failed.kind, failed.reason, failed.round, failed.broke)
        if failed.run == self._run and (assignment := self._assignments.meant(device, failed)):
            self._lose(assignment, failed.reason, "failed")
            self._say(f"{device} cannot {failed.kind} in round {failed.round}: {failed.reason}")

    def on_declined(self, device: str, declined: Declined) -> None:
        """A device does not work now: it is left out without blame, and asked again when it said."""
        if declined.run != self._run or not (assignment := self._assignments.meant(device, declined)):
            return
        reason = f"{declined.reason[:200]}; asked again in {declined.again_s:.0f} s"
        self._store.add_refusal(self._run, declined.round, device, "declined", reason, None)
        self._presence.rest(device, declined.reason, declined.again_s)
        if self.opened and device in self.opened.waiting_for():
            self.opened.declined.add(device)
        self._lose(assignment, f"declined: {declined.reason}", "declined")
        self._say(f"{device} declines to {declined.kind} in round {declined.round}: {reason}")

    def device_left(self, device: str) -> None:
        """It may come back; what it was sending is begun anew then."""
        self._under_way.pop(device, None)
        self._queue = deque(one for one in self._queue if one.assignment.device != device)
        if assignment := self._assignments.of(device):
            assignment.progress = None
        self.grant_uploads()

    # --- uploads ----------------------------------------------------------------------------------------

    def is_uploading(self, device: str) -> bool:
        return device in self.uploading()

    def uploading(self) -> set[str]:
        return {*self._under_way, *(one.assignment.device for one in self._queue)}

    def waits_for_its_turn(self, device: str) -> bool:
        """Whether it is this side that keeps the device waiting."""
        return any(one.assignment.device == device for one in self._queue)

    def grant_uploads(self) -> None:
        """Fetch waiting uploads, a few at a time."""
        while self._queue and len(self._under_way) < UPLOADS_AT_ONCE:
            announced = self._queue.popleft()
            device, result = announced.assignment.device, announced.result
            assert result.upload is not None  # only those are queued
            self._under_way[device] = announced
            topic = self._topics.upload(device, result.upload.digest)
            self._exchange.fetch(result.upload, device, topic, self._upload_finished(announced))

    def _upload_finished(self, announced: Announced) -> Callable[[Manifest, Exception | None], None]:
        assignment, result = announced
        device, began = assignment.device, time.monotonic()

        def finished(manifest: Manifest, error: Exception | None) -> None:
            if self._under_way.pop(device, None) is None:
                return  # it left, or is not wanted any more
            try:
                if error:
                    raise error
                self.links.measured(device, manifest.size, time.monotonic() - began)
                what = f"result of {device} for round {result.round}"
                self._check_staleness(result)
                check_upload(self._blobs.get(manifest.digest), assignment.work.variant.program, what)
            except BadPayload as bad:
                self._reject(device, result, str(bad))
            else:
                self._accept(assignment, result)
            self.grant_uploads()

        return finished

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
        number = round_number if round_number is not None else (self.opened.number if self.opened else None)
        self._store.add_refusal(self._run, number, device, kind, reason, broke)
        log.warning("refused", extra={"device": device, "kind": kind, "reason": reason})

    def _why_never(self, device: str, result: Result) -> str | None:
        """Why a result that is not assigned can never count; None when it still may."""
        record = next((record for record in self._store.rounds(self._run) if record.round == result.round), None)
        if record is None:
            return f"round {result.round} was never asked"
        if self.opened and self.opened.asked(result):
            if device not in self.opened.cohort:
                return f"{device} was not asked in round {result.round}"
            late = self.opened.failed.get(device) in ("deadline", "offline")
            return f"late: round {result.round} does not wait for it any more" if late else None
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _check_staleness(self, result: Result) -> None:
        """Raises BadPayload when the result was made from a state that is too old for the round it would count in."""
        if result.kind == "evaluate" or result.round == self.counts_in:
            return
        if self.counts_in > self._config.rounds:
            raise BadPayload(f"late: round {result.round} is closed for train results, and no other follows")
        staleness, most = self.counts_in - result.round, self._config.max_staleness
        if staleness > most:
            raise BadPayload(f"late: made for round {result.round}, {staleness} rounds ago; at most {most} are allowed")

    def _accept(self, assignment: Assignment, result: Result) -> None:
        device, training = assignment.device, result.kind == "train"
        used_in = self.counts_in if training else result.round
        self._store.add_result(device, result, used_in)
        if training:
            self.counted.add(device)
        if self.opened and device in self.opened.cohort and self.opened.kind == result.kind:
            self.opened.accept(device)
        self._acknowledge(device, result)
        log.info(
            "result accepted",
            extra={
                "device": device, "round": result.round, "kind": result.kind, "samples": result.samples,
                "staleness": used_in - result.round,
            },
        )  # fmt: skip
        self._end(assignment, "accepted")
        self._released(device)

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
        self._end(assignment, outcome)
        self._released(assignment.device)

    def _end(self, assignment: Assignment, outcome: str) -> None:
        if assignment.kind == "train":
            self._store.end_task(self._run, assignment.round, assignment.device, outcome)
        if self._assignments.of(assignment.device) is assignment:
            self._assignments.end(assignment.device)
