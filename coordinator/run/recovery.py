"""Files of a run that were damaged: no device is served with them, and they are made anew where they can be."""

import logging
from collections import Counter

from coordinator.compute.messages import Compute
from coordinator.record.backups import Backups
from coordinator.record.integrity import DamagedBlob, beyond_repair, essential, what_it_held
from coordinator.record.tables import ResultRecord
from coordinator.run.state import RunState
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Failed

log = logging.getLogger(__name__)

DAMAGED_HERE = "is damaged on the coordinator's disk"
DAMAGES = 3
"""Times that the same file is made anew, and that a round is asked again for damaged results: then the disk is at fault
and the run gives up."""


class Recovery:
    """One run's."""

    def __init__(self, state: RunState, exchange: BlobExchange, backups: Backups, compute: Compute) -> None:
        self.restoring = False  # what is damaged is being made anew
        self._state = state
        self._exchange = exchange
        self._backups = backups
        self._compute = compute
        self._made_good: Counter[str] = Counter()  # digests of blobs that were damaged, and how often
        self._excused: set[tuple[str, str]] = set()  # (device, digest): it got a damaged blob from here

    def begin(self, error: DamagedBlob) -> None:
        """A file of this run is damaged: no device is served with it any more, and what is done next makes it anew.

        Raises Damaged where that did not help.
        """
        state = self._state
        self._made_good[error.digest] += 1
        if self._made_good[error.digest] > DAMAGES:
            held = what_it_held(error.digest, state.run, state.store, state.blobs)
            raise beyond_repair(state.run, error.path, held, f"it was damaged {DAMAGES} times", self.copies())
        self.restoring = True
        self.tell()
        self._exchange.stop_sending(error.digest)

    def tell(self) -> None:
        """Name every file that was found to be damaged; devices that are being sent it ask again."""
        state = self._state
        for digest in self._compute.damaged():
            state.blobs.report(digest)
        for digest in state.blobs.found():
            self._made_good.setdefault(digest, 0)
            self._exchange.stop_sending(digest)
            held, path = what_it_held(digest, state.run, state.store, state.blobs), state.blobs.path(digest)
            state.say(f"run {state.run}: {path} {DAMAGED_HERE}: it held {held}")
            log.error("damaged file", extra={"path": str(path), "held": held})

    def copies(self) -> str:
        """Older records of the run, for the operator."""
        files = [str(self._backups.file(number)) for number in self._backups.rounds()]
        return f", or put back an older record ({', '.join(files)}; docs/survival.md says how)" if files else ""

    # --- what devices ask for ---------------------------------------------------------------------------

    def can_serve(self, device: str, digest: str) -> bool:
        """Whether a blob is as it was written. Raises DamagedBlob when it is not, once: then it is being restored."""
        state = self._state
        if not state.tasks.may_read(device, digest) or state.blobs.is_sound(digest):
            return True
        if not self.restoring:
            state.blobs.check(digest)
        return False  # the device asks again

    def is_excused(self, device: str, failed: Failed) -> bool:
        """Whether a task failed since a blob that it names was damaged here. Raises DamagedBlob when it still is."""
        state = self._state
        named = [digest for digest in state.tasks.offered(device) if digest in failed.reason]
        for digest in named:
            if not self.restoring:
                state.blobs.check(digest, anew=True)
        ours = {(device, digest) for digest in named if digest in self._made_good} - self._excused
        self._excused |= ours
        return bool(ours)

    # --- results ----------------------------------------------------------------------------------------

    def damaged_of(self, results: list[ResultRecord]) -> list[ResultRecord]:
        """Those whose uploads are not what came; it reads them."""
        return [result for result in results if result.upload and not self._state.blobs.is_sound(result.upload)]

    def ask_again_for(self, lost: list[ResultRecord], times: int) -> None:
        """Results whose uploads were damaged since they came: they count no more, and their devices are asked again.

        No device is to blame. Raises Damaged when it was of no use before; `times`: how often it happened in the round.
        """
        state = self._state
        self.tell()
        for result in lost:
            path = state.blobs.path(result.upload or "")
            if times > DAMAGES:
                held = f"the upload of {result.device} for round {result.round}"
                why = f"devices were asked again {DAMAGES} times, and what they brought was damaged each time"
                raise beyond_repair(state.run, path, held, why, self.copies())
            state.store.drop_result(state.run, result.round, result.kind, result.device)
            reason = f"its upload {DAMAGED_HERE}: {path}; it is asked again"
            state.refuse(result.device, result.kind, reason, result.round)
            state.say(f"round {state.number}: {result.device}: {reason}")

    def still_needed(self, number: int) -> set[str]:
        """Blobs of devices that are at work, results that wait for the next server step, and all that it takes to make
        the newest state anew from the one before."""
        state = self._state
        since = self._backups.since(number)
        later = state.store.uploads_since(state.run, since + 1)
        if since < number and (record := state.store.round(state.run, since)) and record.state:
            later |= essential(record.state) | set(record.state.uploads.values())
        return later.union(*(task.work.offered() for task in state.tasks))
