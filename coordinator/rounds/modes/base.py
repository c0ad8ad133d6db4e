"""The base of all modes: it draws cohorts and asks them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from coordinator.config import RunConfig
from coordinator.record.privacy import cohort_seed
from coordinator.record.tables import RoundRecord
from coordinator.rounds.cohort import cohort_size, find_selector, select_fair, select_uniform
from coordinator.rounds.open_round import Missing, OpenRound, RoundPlan
from coordinator.rounds.ports import Ports

BACK_S = 5.0
"""Longest wait of an evaluation for devices that have just gone offline."""
EVALUATION_DRAW = 1
"""Added to the seed, so that the devices that test are drawn independently of those that train."""


class Mode(ABC):
    """The order in which rounds follow each other: one file of this package, one row of its table."""

    def __init__(self, run: str, config: RunConfig, ports: Ports) -> None:
        self._run = run
        self._config = config
        self._roster = ports.roster
        self._trainer = ports.trainer
        self._journal = ports.journal
        self._select = find_selector(config.selection)

    @abstractmethod
    def train(self, number: int, before: RoundRecord | None) -> OpenRound:
        """Run the training of a round until no more results are awaited.

        `before`: the round as an earlier process opened it; None for a new round.
        """

    @abstractmethod
    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        """Return whether a task of round `assigned_in` continues after a restart; others are assigned again."""

    @abstractmethod
    def busy(self) -> list[str]:
        """Devices that continue their training while the others are evaluated."""

    def evaluate(self, number: int, leave: Collection[str] = ()) -> OpenRound | None:
        """Let available devices, except those in `leave`, test their models on their own test images.

        Return the closed evaluation; None if no device could be asked.
        """
        config, trainer, roster = self._config, self._trainer, self._roster
        # after a restart of the broker all devices are offline for a moment
        trainer.wait(lambda: roster.is_complete(min(BACK_S, config.rejoin_grace_s)))
        devices = [device for device in roster.available() if device not in leave]
        wanted = cohort_size(config.evaluation_cohort, len(devices))
        cohort = select_uniform(devices, wanted, config.seed, number, EVALUATION_DRAW)
        work = trainer.plan(cohort)
        if work:
            needed = min(quorum(config.evaluation_quorum, len(cohort)), len(work))
            return self.ask(RoundPlan(self._run, number, "evaluate", list(work), needed, work))
        return None

    def compare(self, number: int, can_compare: Callable[[str], bool]) -> OpenRound | None:
        """Let available devices that can do so compare a round's model with the one that they use.

        Return the closed comparison; None if no device could be asked.
        """
        trainer, roster = self._trainer, self._roster
        trainer.wait(lambda: roster.is_complete(self._config.rejoin_grace_s))
        work = trainer.plan([device for device in roster.available() if can_compare(device)])
        if work:
            return self.ask(RoundPlan(self._run, number, "compare", list(work), len(work), work))
        return None

    def free(self) -> list[str]:
        """Available devices without a task and without a result for the current round."""
        taken = {*self._roster.at_work(), *self._journal.find_counted()}
        return [device for device in self._roster.available() if device not in taken]

    def draw(self, number: int, devices: list[str], wanted: int) -> list[str]:
        """Draw the devices that train in a round."""
        config = self._config
        if config.selection == "fair":
            return select_fair(devices, wanted, config.seed, number, self._journal.count_asked())
        if self._select is not None:
            return self._select(devices, wanted, config.seed, number, self._journal.newest_answers(number))
        return select_uniform(devices, wanted, cohort_seed(config), number)

    def ask(self, plan: RoundPlan) -> OpenRound:
        """Ask a cohort, and wait until the round closes by quorum, deadlines or absence."""
        trainer, roster, opened = self._trainer, self._roster, OpenRound(plan)
        trainer.open(opened)
        trainer.offer(opened, opened.waiting_for())
        grace_s = self._config.rejoin_grace_s
        trainer.wait(lambda: opened.closes() or opened.is_given_up(roster.is_online, grace_s))
        at_work = [device for device in roster.at_work() if opened.waits_for(device)]
        for device in () if opened.closes() else at_work:
            opened.fail(device, Missing.OFFLINE)
        trainer.close(opened)
        trainer.withdraw(opened, at_work)
        return opened


def quorum(share: float, devices: int) -> int:
    """Return how many results close a round with a cohort of this size.

    >>> quorum(0.6, 5), quorum(0.5, 5), quorum(0.01, 5)
    (3, 3, 1)
    """
    return max(1, math.ceil(share * devices - 1e-9))
