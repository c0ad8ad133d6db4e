"""The round engine: asks a cohort, makes the next state of its answers, and evaluates it, round by round.

It knows no broker and no database. It has `Ports`: a `Trainer` computes what a `RoundPlan` asks, a `Journal`
keeps what a restart needs. A mode says how rounds follow each other. Runs on devices, regions and simulations differ in
these only.
"""

import logging
import time
from collections.abc import Callable
from pkgutil import resolve_name

from coordinator.config import RunConfig
from coordinator.config.modes import MODES
from coordinator.record.scores import RoundScores
from coordinator.record.tables import SUM, RoundRecord
from coordinator.rounds.modes.base import Mode
from coordinator.rounds.open_round import OpenRound, RoundPlan
from coordinator.rounds.ports import Comparisons, MakeState, Ports, RoundResult
from fedvit.errors import EmptyCohort

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""The run fails after this many attempts at a round without a usable result."""


class RoundEngine:
    """The rounds of one run. `report(line)` prints a line for the operator."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        ports: Ports,
        *,
        step: MakeState,
        report: Callable[[str], None],
    ) -> None:
        mode: type[Mode] = resolve_name(MODES[config.mode].implementation)
        self.mode = mode(run, config, ports)
        self.scores = RoundScores(config.stop)
        self._run = run
        self._config = config
        self._trainer = ports.trainer
        self._journal = ports.journal
        self._history = ports.history
        self._comparisons = ports.comparisons
        self._step = step
        self._log = report

    def run(self) -> None:
        """Run all rounds that an earlier process has not finished, until a rule of [stop] holds."""
        config, journal, history = self._config, self._journal, self._history
        self.scores = scores = RoundScores(config.stop)  # anew: a run that was paused reads its rounds again
        if config.rounds == 0:
            self._test_earlier_run()
            return
        first = max(1, history.first_round())
        for past in history.read_past(first):
            scores.close(past.round, past.figures)
            scores.evaluate(past.round, past.totals.accuracy_mean)
        self._keep_best()
        for number in range(first, config.rounds + 1):
            if scores.reason is not None:
                break
            before = history.find(number)
            self._trainer.begin(number, is_new=before is None)
            if before is None or before.closed_at is None:
                scores.close(number, self.train(number, before))
                before = None
            else:
                scores.close(number, before.figures)
            is_last = number == config.rounds or scores.reason is not None
            if before and before.evaluated:
                scores.evaluate(number, before.totals.accuracy_mean if before.totals else None)
            elif is_last or number % config.evaluate_every == 0:
                self.evaluate(number)
                scores.evaluate(number, journal.keep_evaluation(number))
            self._keep_best()
            if before is None:
                self.finish(number, is_last=is_last or scores.reason is not None)
        if scores.reason is not None:
            self._trainer.dismiss()
            self._log(f"stopped: {scores.reason}")
        if config.promote and self._comparisons:
            self._compare(self._comparisons)

    def _compare(self, comparisons: Comparisons) -> None:
        """Let devices compare the run's model with the one that they use, once."""
        number = comparisons.find_round()
        if not comparisons.has(number):
            self._trainer.begin(number, is_new=False)
            self.mode.compare(number, comparisons.can_compare)
            comparisons.keep(number)

    def _test_earlier_run(self) -> None:
        """Evaluate the state that the run began with, once."""
        journal = self._journal
        tested = journal.open_test()
        self._trainer.begin(tested.round, is_new=False)
        if not tested.evaluated:
            self.evaluate(tested.round)
            journal.keep_evaluation(tested.round)
            self.finish(tested.round, is_last=True)

    def _keep_best(self) -> None:
        if self._config.stop.keeps_best and self.scores.best:
            self._journal.keep_best(self.scores.best)

    def finish(self, number: int, *, is_last: bool = False) -> None:
        """Complete a round, and show it to the operator."""
        self._journal.finish(number, is_last=is_last)

    def evaluate(self, number: int) -> None:
        """Let devices test a round's model."""
        self.add_up_evaluation(self.mode.evaluate(number, leave=self.mode.busy()))

    def add_up_evaluation(self, opened: OpenRound | None) -> None:
        """Add up the counts of a secure run's evaluation. A sum that fails is repeated, and then left out."""
        if opened is None:
            return
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._trainer.add_up(opened)
                return
            except EmptyCohort as error:
                self._log(f"round {opened.number}: evaluation: {error} ({attempt} of {ATTEMPTS} attempts)")

    def train(self, number: int, before: RoundRecord | None) -> dict[str, float]:
        """Train one round, keep its state, and return its figures; `before`: the round as an earlier process left it.

        Raises EmptyCohort after ATTEMPTS attempts without a usable result.
        """
        trainer, journal = self._trainer, self._journal
        failed_attempts = damaged = 0
        earlier_s = journal.devices_s(number) if before else 0.0
        while failed_attempts < ATTEMPTS:
            began = time.monotonic()
            opened = self.mode.train(number, before)
            before = None
            try:
                trainer.add_up(opened)
                updates = journal.results(opened)
                if journal.drop_damaged(updates, damaged):
                    damaged += 1
                    before = self._history.find(number)
                    continue
                trained_s = earlier_s + time.monotonic() - began
                stepped = self._step(opened, updates)
            except EmptyCohort as error:
                if not trainer.is_repeatable:
                    raise
                if opened.failed and opened.failed.keys() <= opened.declined():
                    continue  # all declined: wait until some can be asked
                failed_attempts += 1
                self._log(f"round {number}: {error}; asking again ({failed_attempts} of {ATTEMPTS})")
                log.warning("empty round", extra={"round": number, "reason": str(error)})
                continue
            accepted = sum(update.device != SUM for update in updates)
            figures = stepped.figures | {
                "cohort": float(len(opened.cohort)), "accepted": float(accepted), "devices_s": trained_s,
                "server_s": earlier_s + time.monotonic() - began - trained_s,
                "declined": float(len(opened.declined())),
                "late": float(sum(update.round < number for update in updates)),
            }  # fmt: skip
            result = RoundResult(number, updates, stepped, figures, is_last=number == self._config.rounds)
            journal.close(result)
            if result.is_last:
                trainer.dismiss()
            journal.prune(result)
            return figures
        show = self._history.show_command()
        raise EmptyCohort("FV1501", f"round {number}: no usable result in {ATTEMPTS} attempts; see `{show}`")

    def resume_tasks(self) -> None:
        """Assign again the tasks of an earlier process that the mode continues; their results still count."""
        trainer, journal = self._trainer, self._journal
        open_round = self._history.open_round()
        journal.begin(open_round)  # before any device can bring a late result
        if not self._config.uses_late_results() or open_round > self._config.rounds:
            return
        tasks = [task for task in journal.find_unanswered() if self.mode.continues_task(task.round, open_round)]
        for number in sorted({task.round for task in tasks}):
            work = trainer.recall(task for task in tasks if task.round == number)
            trainer.offer(OpenRound(RoundPlan(self._run, number, "train", list(work), len(work), work)), work)
