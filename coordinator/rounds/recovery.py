"""Damaged files of a run: they are not sent to devices, and are recomputed if possible."""

import logging
from collections import Counter

from coordinator.compute.integrity import DamagedBlob, blob_description, essential, unrepairable
from coordinator.compute.messages import Compute
from coordinator.record.backups import Backups
from coordinator.record.tables import ResultRecord
from coordinator.rounds.state import RunState
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import Failed

log = logging.getLogger(__name__)

DAMAGED_HERE = "is damaged on the coordinator's disk"
DAMAGES = 3
"""The run fails after this many recoveries of one file, or repeats of a round for damaged results: then the disk is at
fault."""


class Recovery:
    """The recovery of one run."""

    def __init__(self, state: RunState, exchange: BlobExchange, backups: Backups, compute: Compute) -> None:
        self.restoring = False  # damaged files are being recomputed
        self._state = state
        self._exchange = exchange
        self._backups = backups
        self._compute = compute
        self._restored: Counter[str] = Counter()  # digest of a damaged blob -> number of recoveries
        self._excused: set[tuple[str, str]] = set()  # the device received a damaged blob from here

    def begin(self, error: DamagedBlob) -> None:
        """Begin the recovery of a damaged file: it is no longer sent, and the next attempt recomputes it.

        Raises Damaged if that did not help DAMAGES times.
        """
        state = self._state
        self._restored[error.digest] += 1
        if self._restored[error.digest] > DAMAGES:
            held = blob_description(error.digest, state.run, state.store, state.blobs)
            raise unrepairable(state.run, error.path, held, f"it was damaged {DAMAGES} times", self.copies())
        self.restoring = True
        self.report_damage()
        self._exchange.stop_sending(error.digest)

    def report_damage(self) -> None:
        """Report every file that was found damaged, and stop sending it; receivers ask again."""
        state = self._state
        for digest in self._compute.damaged():
            state.blobs.report(digest)
        for digest in state.blobs.found():
            self._restored.setdefault(digest, 0)
            self._exchange.stop_sending(digest)
            held, path = blob_description(digest, state.run, state.store, state.blobs), state.blobs.path(digest)
            state.operator_log(f"run {state.run}: {path} {DAMAGED_HERE}: it held {held}")
            log.error("damaged file", extra={"path": str(path), "held": held})

    def copies(self) -> str:
        """Older records of the run, for the operator."""
        files = [str(copy) for copy in self._backups.copies()]
        return f", or put back an older record ({', '.join(files)}; docs/survival.md says how)" if files else ""

    # --- what devices ask for ---------------------------------------------------------------------------

    def can_serve(self, device: str, digest: str) -> bool:
        """Return whether a blob may be sent to a device. Raise DamagedBlob if it is damaged and not being recovered."""
        state = self._state
        if not state.tasks.may_read(device, digest) or state.blobs.is_intact(digest):
            return True
        if not self.restoring:
            state.blobs.check(digest)
        return False  # the device asks again

    def is_excused(self, device: str, failed: Failed) -> bool:
        """Return whether a task failed because its blob was damaged here. Raise DamagedBlob if it still is."""
        state = self._state
        named = [digest for digest in state.tasks.offered(device) if digest in failed.reason]
        for digest in named:
            if not self.restoring:
                state.blobs.check(digest, anew=True)
        excused = {(device, digest) for digest in named if digest in self._restored} - self._excused
        self._excused |= excused
        return bool(excused)

    # --- results ----------------------------------------------------------------------------------------

    def damaged_of(self, results: list[ResultRecord]) -> list[ResultRecord]:
        """Results whose stored uploads are damaged; reads the uploads."""
        return [result for result in results if result.upload and not self._state.blobs.is_intact(result.upload)]

    def ask_again_for(self, lost: list[ResultRecord], times: int) -> None:
        """Drop results whose uploads were damaged on this disk; their devices are asked again, without a strike.

        `times`: how often this has happened in the round. Raises Damaged after DAMAGES times.
        """
        state = self._state
        self.report_damage()
        for result in lost:
            path = state.blobs.path(result.upload or "")
            if times > DAMAGES:
                held = f"the upload of {result.device} for round {result.round}"
                why = f"devices were asked again {DAMAGES} times, and their uploads were damaged each time"
                raise unrepairable(state.run, path, held, why, self.copies())
            state.store.tasks.drop_result(state.run, result.round, result.kind, result.device)
            reason = f"its upload {DAMAGED_HERE}: {path}; it is asked again"
            state.refuse(result.device, result.kind, reason, result.round)
            state.operator_log(f"round {state.number}: {result.device}: {reason}")

    def still_needed(self, number: int) -> set[str]:
        """Blobs of current tasks, also uploads that are being checked, results for the next server step, and everything
        needed to recompute the newest state from the previous one."""
        state = self._state
        since = self._backups.since(number)
        later = state.store.tasks.find_uploads_since(state.run, since + 1)
        if since < number and (record := state.store.rounds.read(state.run, since)) and record.state:
            later |= essential(record.state) | set(record.state.uploads.values())
        later |= {task.result.upload.digest for task in state.tasks if task.result and task.result.upload}
        return later.union(*(task.work.offered() for task in state.tasks))
