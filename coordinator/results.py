"""Results as they come in: fetched, checked, kept, and answered exactly once with yes or no."""

import logging
from collections.abc import Callable

from coordinator.admission import LABELS, check_labels, check_result, check_upload
from coordinator.open_round import OpenRound
from coordinator.presence import Presence
from coordinator.store import Store
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.program import Program
from fedvit.resources import BudgetKind
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Failed, Manifest, Result, ResultAck
from fedvit.wire.topics import Topics

log = logging.getLogger(__name__)

UPLOADS_AT_ONCE = 4
"""Uploads granted at the same time, so that a cohort cannot overrun the broker's queues."""


class Results:
    """The desk for one run's results; `opened` is the round that is being asked, None between rounds.

    `strike(device, round, reason)` hears of results that no honest device brings.

    Idempotent by (run, round, kind, device). Whatever is refused is counted in the store, answered with the
    reason, and never fatal.
    """

    def __init__(
        self,
        *,
        run: str,
        store: Store,
        blobs: BlobStore,
        exchange: BlobExchange,
        topics: Topics,
        presence: Presence,
        answer: Callable[[str, ResultAck], None],
        say: Callable[[str], None],
        strike: Callable[[str, int, str], None],
    ) -> None:
        self.opened: OpenRound | None = None
        self._run = run
        self._store = store
        self._blobs = blobs
        self._exchange = exchange
        self._topics = topics
        self._presence = presence
        self._answer = answer
        self._say = say
        self._strike = strike

    def on_result(self, device: str, result: Result) -> None:
        """Take a result, or refuse it; one that was taken before is only acknowledged again."""
        opened = self.opened
        if result.run != self._run:
            # a run that was interrupted may be resumed: the device keeps its result till then
            if not any(record.id == result.run and record.status != "finished" for record in self._store.runs()):
                self._reject(device, result, f"run {result.run!r} is not served here, this is {self._run!r}")
        elif any(kept.device == device for kept in self._store.results(self._run, result.round, result.kind)):
            self._acknowledge(device, result)
        elif opened is None or not opened.asked(result):
            if reason := self._why_never(result):
                self._reject(device, result, reason)
            # else its round will be opened again, by this process after a restart: the device keeps it till then
        elif device not in opened.cohort:
            self._reject(device, result, f"{device} was not asked in round {result.round}")
        elif device in opened.failed or opened.is_uploading(device) or not self._presence.is_online(device):
            return  # the answer is on its way, or will follow when the device has said hello
        else:
            try:
                check_result(result, opened.work[device].variant.program, self._presence[device].hello)
            except BadPayload as error:
                self._reject(device, result, str(error))
                self._strike(device, result.round, str(error))
                return
            if result.upload is None:
                self._accept(device, result)
            else:
                opened.queue.append((device, result))
                self.grant_uploads()

    def close(self) -> None:
        """The round is over: what comes from now on is late, and so is what waits for its turn."""
        opened, self.opened = self.opened, None
        for device, result in opened.late_uploads() if opened else ():
            self._exchange.cancel(device)
            self._reject(device, result, f"late: round {result.round} closed before the upload was here")

    def on_failed(self, device: str, failed: Failed) -> None:
        """A device says that it cannot do its task."""
        self.refuse(device, failed.kind, failed.reason, failed.round, failed.broke)
        if self.opened and self.opened.asked(failed):
            self.opened.fail(device, failed.reason)
            self._say(f"{device} cannot {failed.kind} in round {failed.round}: {failed.reason}")

    def device_left(self, device: str) -> None:
        if self.opened:
            self.opened.device_left(device)
        self.grant_uploads()

    def grant_uploads(self) -> None:
        """Fetch waiting uploads, a few at a time."""
        opened = self.opened
        while opened and opened.queue and len(opened.under_way) < UPLOADS_AT_ONCE:
            device, result = opened.queue.popleft()
            assert result.upload is not None  # only those are queued
            opened.under_way[device] = result
            topic = self._topics.upload(device, result.upload.digest)
            self._exchange.fetch(result.upload, device, topic, self._upload_finished(opened, device, result))

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

    def _why_never(self, result: Result) -> str | None:
        """Why a result for a round that is not open can never count; None when it still may."""
        record = next((record for record in self._store.rounds(self._run) if record.round == result.round), None)
        if record is None:
            return f"round {result.round} was never asked"
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _upload_finished(
        self, opened: OpenRound, device: str, result: Result
    ) -> Callable[[Manifest, Exception | None], None]:
        def finished(manifest: Manifest, error: Exception | None) -> None:
            opened.under_way.pop(device, None)
            try:
                if error:
                    raise error
                self._check(device, result, manifest, opened.work[device].variant.program)
            except BadPayload as bad:  # the link's, or the device's
                self._reject(device, result, str(bad))
                if not error:
                    self._strike(device, result.round, str(bad))
            else:
                self._accept(device, result)
            self.grant_uploads()

        return finished

    def _check(self, device: str, result: Result, manifest: Manifest, program: Program) -> None:
        what = f"result of {device} for round {result.round}"
        tensors = check_upload(self._blobs.get(manifest.digest), program, what)
        if LABELS in tensors and device in self._presence:
            check_labels(tensors[LABELS], program, self._presence[device].hello, what)

    def _accept(self, device: str, result: Result) -> None:
        self._store.add_result(device, result)
        if self.opened:
            self.opened.accepted.add(device)
        self._acknowledge(device, result)
        log.info(
            "result accepted",
            extra={"device": device, "round": result.round, "kind": result.kind, "samples": result.samples},
        )

    def _acknowledge(self, device: str, result: Result) -> None:
        self._answer(device, ResultAck(result.run, result.round, result.kind, accepted=True))

    def _reject(self, device: str, result: Result, reason: str) -> None:
        self.refuse(device, result.kind, reason, result.round)
        if self.opened and self.opened.asked(result):
            self.opened.fail(device, reason)
            self._say(f"{device}: {result.kind} result of round {result.round} refused: {reason}")
        self._answer(device, ResultAck(result.run, result.round, result.kind, accepted=False, reason=reason[:500]))
