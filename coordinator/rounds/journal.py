"""The journal of a run on devices: its record, backups, blobs and mirror. What is acknowledged is on the disk."""

import logging
import time
from collections.abc import Mapping
from functools import partial

import msgspec

from coordinator.compute.integrity import essential
from coordinator.record.backups import Closed
from coordinator.record.retention import oldest_kept
from coordinator.record.rounds import ClosedRound, RoundWork
from coordinator.record.scores import find_round
from coordinator.record.tables import (
    Asked,
    DeviceModelRecord,
    ModelRecord,
    ResultRecord,
    RoundRecord,
    RoundTotals,
    TaskRecord,
    now,
)
from coordinator.record.totals import add_evaluation
from coordinator.rounds.models.requests import add_model
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.parts import RunParts
from coordinator.rounds.ports import Journal, RoundResult
from coordinator.rounds.round_line import round_line
from coordinator.rounds.tasks import Work
from fedvit.comparison import read_metrics
from fedvit.hints import command

log = logging.getLogger(__name__)

PARTIAL_KEPT_S = 24 * 3600.0
"""Time for which a partial upload is kept for a device that may continue it."""
SETTLE_S = 5.0
"""Longest wait for the reports of devices whose models change at the end of a run."""


class RecordJournal(Journal):
    """The journal of a run in the record of all runs."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._store = parts.state.store
        self._run = parts.state.run

    # --- as an earlier process left it ------------------------------------------------------------------

    def first_round(self) -> int:
        first_open = min((record.round for record in self._store.rounds.read_open(self._run)), default=None)
        return first_open - 1 if first_open else self._store.rounds.find_last(self._run)

    def open_round(self) -> int:
        newest = self._store.rounds.read_newest_closed(self._run)
        return newest.round + 1 if newest else 1

    def find(self, number: int) -> RoundRecord | None:
        return self._store.rounds.read(self._run, number)

    def read_past(self, first: int) -> list[ClosedRound]:
        return [past for past in self._store.rounds.read_totals(self._run) if past.round < first]

    def find_unanswered(self, number: int | None = None) -> list[TaskRecord]:
        return self._store.tasks.read_unanswered(self._run, number)

    def devices_s(self, number: int) -> float:
        return self._parts.reporter.devices_s(number)

    def count_asked(self) -> Mapping[str, Asked]:
        return self._store.devices.read_asked(self._run)

    def show_command(self) -> str:
        return command("coordinator", "show", self._run, runs=self._store.database.folder)

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

    # --- an open round ----------------------------------------------------------------------------------

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
        if parts.objects:
            parts.objects.prune(needed)
        freed = parts.inbox.in_background(partial(state.blobs.delete, unneeded))
        log.info("round closed", extra={"round": result.number, "freed_bytes": freed, **result.figures})

    def keep_evaluation(self, number: int) -> float | None:
        results = self._state.results(number, "evaluate")
        self._store.rounds.close_evaluation(self._run, number, results)
        return add_evaluation(RoundTotals(cohort=0), results).totals.accuracy_mean

    def find_compared(self) -> int:
        return find_round(self._store, self._run, None).round

    def has_comparison(self, number: int) -> bool:
        return self._store.models.has(f"{self._run}-{number}")

    def keep_comparison(self, number: int) -> None:
        """Store the counts with what the rules say of them, in one transaction; then devices hear of it."""
        state, rules = self._state, self._state.config.promote
        name, at = f"{self._run}-{number}", now()
        rows = []
        for result in state.results(number, "compare"):
            comparison, paired = read_metrics(result.metrics)
            labels = state.presence[result.device].hello.labels if result.device in state.presence else {}
            rows.append(
                DeviceModelRecord(
                    model=name, device=result.device, labels=dict(labels), comparison=comparison, paired=paired,
                    actual="challenger", changed_at=at,
                )
            )  # fmt: skip
        model = ModelRecord(
            name=name, run=self._run, round=number, method=state.config.method, classes=len(state.classes),
            created_at=at, stage="challenger", rules=msgspec.to_builtins(rules), reason="", changed_at=at,
        )  # fmt: skip
        self._parts.operator_log(add_model(self._store, model, rows))
        if keeper := self._parts.models:
            keeper.look()
            self._parts.inbox.pump(keeper.is_settled, deadline=time.monotonic() + SETTLE_S)

    def keep_best(self, number: int) -> None:
        """Its blobs are here: they were those of the newest round, or are kept since."""
        self._state.best = number

    def _find_best_blobs(self) -> set[str]:
        best = self.find(self._state.best) if self._state.best else None
        return essential(best.state) if best and best.state else set()

    def finish(self, number: int, *, is_last: bool = False) -> None:
        self._state.spans.close_round()
        self._parts.operator_log(round_line(self._store, self._run, number, self._state.config.rounds))
