"""Results as they come in: fetched, checked, kept, and answered exactly once with yes or no."""

import logging
from collections.abc import Callable

from coordinator.admission import check_result, check_upload
from coordinator.open_round import OpenRound
from coordinator.presence import Presence
from coordinator.store import Store
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.resources import BudgetKind
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Failed, Manifest, Result, ResultAck
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import WINDOW_CHUNKS

log = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4 * WINDOW_CHUNKS
"""Chunks of uploads that may be under way at the same time, so that a cohort cannot overrun the broker's queues: four
large uploads with full windows, or as many more as are small."""


class Results:
    """The desk for one run's results; `opened` is the round that is being asked, None between rounds.

    Idempotent by (run, round, kind, device). Whatever is refused is counted in the store, answered with the
    reason, and never fatal. What is good waits in `checked` until `keep` puts all of it into the store at once and
    answers: a transaction is synced to disk, which for each of five hundred results would be most of a round.
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
    ) -> None:
        self.opened: OpenRound | None = None
        self.checked: dict[str, Result] = {}  # by device: good, not in the store yet
        self._run = run
        self._store = store
        self._blobs = blobs
        self._exchange = exchange
        self._topics = topics
        self._presence = presence
        self._answer = answer
        self._say = say

    def on_result(self, device: str, result: Result) -> None:
        """Take a result, or refuse it; one that was taken before is only acknowledged again."""
        opened = self.opened
        if result.run != self._run:
            # a run that was interrupted may be resumed: the device keeps its result till then
            if not any(record.id == result.run and record.status != "finished" for record in self._store.runs()):
                self._reject(device, result, f"run {result.run!r} is not served here, this is {self._run!r}")
        elif opened is None or not opened.asked(result):
            if self._store.has_result(self._run, result.round, result.kind, device):
                self._acknowledge(device, result)
            elif reason := self._why_never(result):
                self._reject(device, result, reason)
            # else its round will be opened again, by this process after a restart: the device keeps it till then
        elif device in opened.accepted:
            self._acknowledge(device, result)
        elif device in self.checked:
            return  # it is about to be answered
        elif device not in opened.work:
            self._reject(device, result, f"{device} was not asked in round {result.round}")
        elif not opened.waits_for(device) or opened.is_uploading(device) or not self._presence.is_online(device):
            return  # the answer is on its way, or will follow when the device has said hello
        else:
            try:
                check_result(result, opened.work[device].variant.program, self._presence[device].hello)
            except BadPayload as error:
                self._reject(device, result, str(error))
                return
            if result.upload is None:
                self._accept(device, result)
            else:
                opened.queue[device] = result
                self.grant_uploads()

    def close(self) -> None:
        """The round is over: what comes from now on is late, and so is what waits for its turn."""
        self.keep()
        opened, self.opened = self.opened, None
        for device, result in opened.late_uploads() if opened else ():
            self._exchange.cancel(device)
            self._reject(device, result, f"late: round {result.round} closed before the upload was here")

    def pause(self) -> None:
        """The round will be opened again by this process: what is under way is begun anew then."""
        opened, self.opened = self.opened, None
        for device in opened.under_way if opened else ():
            self._exchange.cancel(device)

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
        while opened and opened.queue:
            device, result = next(iter(opened.queue.items()))
            assert result.upload is not None  # only those are queued
            if opened.under_way and opened.chunks_under_way + window_of(result.upload) > CHUNKS_AT_ONCE:
                return
            del opened.queue[device]
            opened.start(device, result, window_of(result.upload))
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
        record = self._store.round(self._run, result.round)
        if record is None:
            return f"round {result.round} was never asked"
        over = record.closed_at is not None if result.kind == "train" else record.evaluated
        return f"late: round {result.round} is closed for {result.kind} results" if over else None

    def _upload_finished(
        self, opened: OpenRound, device: str, result: Result
    ) -> Callable[[Manifest, Exception | None], None]:
        def finished(manifest: Manifest, error: Exception | None) -> None:
            opened.end(device)
            try:
                if error:
                    raise error
                what = f"result of {device} for round {result.round}"
                check_upload(self._blobs.get(manifest.digest), opened.work[device].variant.program, what)
            except BadPayload as bad:
                self._reject(device, result, str(bad))
            else:
                self._accept(device, result)
            self.grant_uploads()

        return finished

    def _accept(self, device: str, result: Result) -> None:
        self.checked[device] = result

    def keep(self) -> None:
        """Put what was checked into the store, then acknowledge it. To be called when what arrived was handled."""
        if not self.checked:
            return
        kept, self.checked = self.checked, {}
        self._store.add_results(list(kept.items()))
        for device, result in kept.items():
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


def window_of(upload: Manifest) -> int:
    """Chunks of an upload that are under way at most."""
    return min(upload.chunks, WINDOW_CHUNKS)
