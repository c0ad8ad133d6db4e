"""The newest intact state of a run: if its blobs are damaged, rounds are recomputed from an older state.

Server steps are repeatable bit for bit. The recorded digests show whether a repeated step gave the same numbers; a run
never continues with different numbers.
"""

import logging
from typing import NoReturn

import msgspec

from coordinator.compute.checkpoint import save_state
from coordinator.compute.integrity import VerifiedBlobs, blob_description, essential, unrepairable
from coordinator.compute.server_step import ServerStep
from coordinator.record.tables import Reference, RoundRecord, SavedState
from fedvit.errors import EmptyCohort

log = logging.getLogger(__name__)


def newest_state(step: ServerStep, copies: str) -> tuple[SavedState, list[int]]:
    """Return the state to resume from, and the rounds whose states were recomputed.

    `copies` names older records of the run, for the operator. Raises Damaged, naming the file and what to do, if a
    damaged state cannot be recomputed.
    """
    plan, blobs, updates = step.plan, step.blobs, step.config.updates
    broken: list[tuple[RoundRecord, SavedState]] = []  # newest first
    record = step.store.rounds.read_newest_closed(step.run)
    while record and record.state and _find_damaged(record.state, blobs):
        broken.append((record, record.state))
        record = step.store.rounds.read_newest_closed(step.run, before=record.round)
    saved = record.state if record and record.state else save_state(plan.state, plan.groups, blobs, updates)
    damaged = _find_damaged(broken[0][1], blobs) if broken else []
    for record, recorded in reversed(broken):
        saved = _Recomputation(step, record, recorded, damaged, copies).recompute(saved)
    references = {group: _usable(reference, blobs) for group, reference in saved.references.items()}
    return msgspec.structs.replace(saved, references=references), [record.round for record, _ in reversed(broken)]


def _find_damaged(saved: SavedState, blobs: VerifiedBlobs) -> list[str]:
    return sorted(digest for digest in essential(saved) if not blobs.is_intact(digest))


def _usable(reference: Reference, blobs: VerifiedBlobs) -> Reference:
    """The reference without damaged patches and their predecessors: devices that need one get the whole value."""
    links = list(reference.links)
    broken = [position for position, link in enumerate(links) if not blobs.is_intact(link.patch)]
    return msgspec.structs.replace(reference, links=tuple(links[broken[-1] + 1 :])) if broken else reference


class _Recomputation:
    """One closed round that is recomputed."""

    def __init__(
        self,
        step: ServerStep,
        record: RoundRecord,
        recorded: SavedState,
        damaged: list[str],  # damaged blobs of the newest state
        copies: str,
    ) -> None:
        self._step = step
        self._number = record.round
        self._recorded = recorded
        self._find_damaged = damaged
        self._copies = copies

    def recompute(self, before: SavedState) -> SavedState:
        step, number = self._step, self._number
        step.progress(f"round {number}: its state is damaged on this disk and is recomputed")
        results = step.results(number)
        for result in results:
            if result.upload and not step.blobs.is_intact(result.upload):
                self._give_up(f"the upload of {result.device} for round {result.round} is damaged, too")
        try:
            saved = step.again(number, results, before)
        except EmptyCohort as error:
            self._give_up(str(error))
        if essential(saved) != essential(self._recorded):
            self._give_up(f"round {number}, recomputed, gives different numbers")
        log.warning("state recomputed", extra={"round": number, "digests": self._find_damaged})
        return self._recorded

    def _give_up(self, why: str) -> NoReturn:
        step, digest = self._step, self._find_damaged[0]
        held = blob_description(digest, step.run, step.store, step.blobs)
        raise unrepairable(step.run, step.blobs.path(digest), held, why, self._copies)
