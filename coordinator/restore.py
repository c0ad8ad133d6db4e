"""The newest state of a run, whole: where blobs of it are damaged, rounds are reckoned again from an older state.

Server steps are repeatable to the bit, and whether one was repeated the recorded digests tell: other numbers are never
gone on with.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

import msgspec

from coordinator.checkpoint import load_state, save_state
from coordinator.course import Course
from coordinator.downlink import Reference
from coordinator.integrity import SoundBlobs, beyond_repair, what_it_held
from coordinator.server_step import ServerStep
from coordinator.tables import RoundRecord, SavedState
from fedvit.errors import EmptyCohort

log = logging.getLogger(__name__)


def newest_state(course: Course, step: ServerStep, copies: Callable[[], str]) -> SavedState:
    """What the run goes on from; `copies()` names older records of it, for the operator.

    Raises Damaged, naming the file and what to do, where a damaged state cannot be made anew.
    """
    plan, blobs, updates = course.plan, course.blobs, course.config.updates
    broken: list[tuple[RoundRecord, SavedState]] = []  # newest first
    record = course.store.newest_closed(course.run)
    while record and record.state and _damaged(record.state, blobs):
        broken.append((record, record.state))
        record = course.store.newest_closed(course.run, before=record.round)
    saved = record.state if record and record.state else save_state(plan.state, plan.groups, blobs, updates)
    damaged = _damaged(broken[0][1], blobs) if broken else []
    for record, recorded in reversed(broken):
        saved = _Again(course, step, record, recorded, damaged, copies).closed(saved)
    return msgspec.structs.replace(
        saved, references={group: _usable(reference, blobs) for group, reference in saved.references.items()}
    )


def essential(saved: SavedState) -> set[str]:
    """Blobs without which nobody can go on from a state; all others are made anew, or done without."""
    sent = {reference.digest for reference in saved.references.values()}
    return {*saved.groups.values(), *sent} | ({saved.memory} if saved.memory else set())


def _damaged(saved: SavedState, blobs: SoundBlobs) -> list[str]:
    return sorted(digest for digest in essential(saved) if not blobs.is_sound(digest))


def _usable(reference: Reference, blobs: SoundBlobs) -> Reference:
    """Without the patches that are damaged, and those before them: devices that need one get the whole value."""
    links = list(reference.links)
    broken = [position for position, link in enumerate(links) if not blobs.is_sound(link.patch)]
    return msgspec.structs.replace(reference, links=tuple(links[broken[-1] + 1 :])) if broken else reference


class _Again:
    """One closed round that is reckoned again."""

    def __init__(
        self,
        course: Course,
        step: ServerStep,
        record: RoundRecord,
        recorded: SavedState,
        damaged: list[str],  # blobs of the newest state, for which all of this is done
        copies: Callable[[], str],
    ) -> None:
        self._course = course
        self._step = step
        self._number = record.round
        self._recorded = recorded
        self._damaged = damaged
        self._copies = copies

    def closed(self, before: SavedState) -> SavedState:
        course, plan, number = self._course, self._course.plan, self._number
        course.doing = f"round {number}: its state is damaged on this disk, and is made anew"
        results = course.store.used_in(course.run, number)
        for result in results:
            if result.upload and not course.blobs.is_sound(result.upload):
                self._give_up(f"the upload of {result.device} for round {result.round} is not whole either")
        try:
            state = self._step.again(number, results, load_state(before, course.blobs, plan.values))
        except EmptyCohort as error:
            self._give_up(str(error))
        saved = save_state(state, plan.groups, course.blobs, course.config.updates, before)
        if essential(saved) != essential(self._recorded):
            self._give_up(f"round {number}, reckoned again, gives other numbers")
        course.say(f"round {number}: its state was made anew, with the same numbers")
        log.warning("state made anew", extra={"round": number, "digests": self._damaged})
        return self._recorded

    def _give_up(self, why: str) -> NoReturn:
        course, digest = self._course, self._damaged[0]
        held = what_it_held(digest, course.run, course.store, course.blobs)
        raise beyond_repair(course.run, course.blobs.path(digest), held, why, self._copies)
