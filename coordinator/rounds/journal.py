"""The journal of a run on devices: its record, backups, blobs and mirror. What is acknowledged is on the disk."""

import logging
from collections.abc import Mapping
from functools import partial

from coordinator.compute.integrity import essential
from coordinator.record.backups import Closed
from coordinator.record.retention import oldest_kept
from coordinator.record.rounds import RoundWork
from coordinator.record.scores import find_round
from coordinator.record.tables import (
    Asked,
    ResultRecord,
    RoundRecord,
    RoundTotals,
    TaskRecord,
)
from coordinator.record.totals import add_evaluation
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.parts import RunParts
from coordinator.rounds.ports import Journal, RoundResult
from coordinator.rounds.round_line import round_line
from coordinator.rounds.tasks import Work

log = logging.getLogger(__name__)

PARTIAL_KEPT_S = 24 * 3600.0
"""Time for which a partial upload is kept for a device that may continue it."""


class RecordJournal(Journal):
    """The journal of a run in the record of all runs."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._store = parts.state.store
        self._run = parts.state.run

    # --- an open round ----------------------------------------------------------------------------------

    def find_unanswered(self, number: int | None = None) -> list[TaskRecord]:
        return self._store.tasks.read_unanswered(self._run, number)

    def devices_s(self, number: int) -> float:
        return self._parts.reporter.devices_s(number)

    def count_asked(self) -> Mapping[str, Asked]:
        return self._store.devices.read_asked(self._run)

    def newest_answers(self, number: int) -> Mapping[str, ResultRecord]:
        return self._store.tasks.read_newest_used(self._run, number)

    def begin(self, number: int) -> None:
        self._state.count_in(number)

    def find_counted(self) -> set[str]:
        return self._state.counted

    def open(self, number: int, cohort: list[str], needed: int) -> None:
        self._store.rounds.open(self._run, number, cohort, needed)

    def add_tasks(self, number: int, work: Mapping[str, Work]) -> None:
        """Store the tasks and their expected cost, before they are sent to devices."""
        if self._state.mirror:
            self._parts.mirror({digest for part in work.values() for digest in part.offered()})
        tasks = [
            TaskRecord(number, device, part.planned.program, part.planned.groups, part.planned.expected, part.attempt)
            for device, part in work.items()
            if device not in self._state.counted
        ]
        self._store.tasks.add(self._run, tasks)

    def results(self, opened: OpenRound) -> list[ResultRecord]:
        """Raises Damaged if the record lacks a result that was acknowledged."""
        results = self._state.results(opened.number, "train")
        if missing := opened.accepted - self._store.tasks.find_counted(self._run, opened.number):
            raise self._store.database.make_damaged_error(
                f"the result of {min(missing)} for round {opened.number} is missing from it"
            )
        return results

    def drop_damaged(self, results: list[ResultRecord], repeats: int) -> bool:
        recovery = self._parts.recovery
        lost = self._parts.inbox.in_background(partial(recovery.damaged_of, results))
        if lost:
            recovery.ask_again_for(lost, repeats + 1)
        return bool(lost)

    # --- a closed round ---------------------------------------------------------------------------------

    def open_test(self) -> RoundRecord:
        rounds, run, config = self._store.rounds, self._run, self._state.config
        if (left := rounds.read_newest_closed(run)) is not None:
            return left
        assert config.start_from is not None  # the configuration has been checked
        number = find_round(self._store, config.start_from, config.start_round).round
        with self._store.database.together():
            rounds.open(run, number, [], 0)
            rounds.close(run, number, self._state.newest(), {}, RoundWork([], []))
        tested = rounds.read(run, number)
        assert tested is not None  # it was just written
        return tested

    def close(self, result: RoundResult) -> None:
        state, store, parts = self._state, self._store, self._parts
        number, saved, figures = result.number, result.stepped.saved, result.figures
        parts.mirror(essential(saved).union(saved.uploads.values()))
        state.saved = saved
        asked = store.tasks.list_asked(self._run, number)
        parts.backups.note(Closed(number, asked, saved, figures))
        with store.database.together():
            store.rounds.close(self._run, number, saved, figures, RoundWork(asked, result.updates))
            store.devices.set_announced(self._run, parts.membership.take_announced())
        parts.inbox.in_background(partial(parts.backups.after_round, number, last=result.is_last))
        oldest = oldest_kept(number, state.config.keep_rounds, parts.backups.since(number))
        if oldest is not None:
            store.runs.thin(self._run, oldest, keep=state.best)

    def prune(self, result: RoundResult) -> None:
        """Remove blobs that are no longer needed."""
        state, parts = self._state, self._parts
        needed = result.stepped.needed | parts.recovery.still_needed(result.number) | self._find_best_blobs()
        unneeded = list(state.blobs.prunable(needed, PARTIAL_KEPT_S))  # now, before devices send new ones
        self._store.database.check_leads()  # none of them is of a later leader, whenever they are removed
        state.blobs.forget_all_but(needed)
        state.tasks.keep_offers(needed)  # a late request for what was removed would look like a damaged file
        if parts.objects:
            parts.objects.prune(needed)
        freed = parts.inbox.in_background(partial(state.blobs.delete, unneeded))
        log.info("round closed", extra={"round": result.number, "freed_bytes": freed, **result.figures})

    def keep_evaluation(self, number: int) -> float | None:
        results = self._state.results(number, "evaluate")
        self._store.rounds.close_evaluation(self._run, number, results)
        return add_evaluation(RoundTotals(cohort=0), results).totals.accuracy_mean

    def keep_best(self, number: int) -> None:
        """Its blobs are here: they were those of the newest round, or are kept since."""
        self._state.best = number

    def _find_best_blobs(self) -> set[str]:
        best = self._store.rounds.read(self._run, self._state.best) if self._state.best else None
        return essential(best.state) if best and best.state else set()

    def finish(self, number: int, *, is_last: bool = False) -> None:
        self._state.spans.close_round()
        self._parts.operator_log(round_line(self._store, self._run, number, self._state.config.rounds))
