"""Rounds without a cohort: FedBuff (Nguyen et al. 2022). Free devices train; `buffer` results make a server step."""

from coordinator.record.tables import RoundRecord
from coordinator.rounds.modes.base import Mode
from coordinator.rounds.open_round import OpenRound, RoundPlan


class Buffered(Mode):
    """Devices are asked as they become free, until there are `buffer` results.

    A device is asked and counts only once per round: its random draws follow from the round, so that it would return
    the same result again.
    """

    def train(self, number: int, before: RoundRecord | None) -> OpenRound:
        trainer, journal, wanted = self._trainer, self._journal, self._config.buffer
        asked = list(before.cohort) if before else []
        journal.open(number, asked, wanted)
        opened = OpenRound(RoundPlan(self._run, number, "train", self._roster.at_work(), wanted))
        trainer.open(opened)
        counted = journal.find_counted()
        opened.extend(counted)
        for device in counted:
            opened.accept(device)
        while True:
            trainer.wait(lambda: self._is_full(opened) or self._vacancies(opened) > 0 or self._is_stuck(opened))
            if self._is_full(opened) or not (vacancies := self._vacancies(opened)):
                break
            work = trainer.plan(self.draw(number, self._candidates(opened), vacancies))
            asked += work
            journal.open(number, asked, wanted)
            opened.work |= work
            journal.add_tasks(number, work)
            opened.extend(work)
            trainer.offer(opened, work)
        trainer.close(opened)
        return opened

    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        return True

    def busy(self) -> list[str]:
        """None: some device is always at work, so all are evaluated once they have answered, and none trains then."""
        return []

    def _is_full(self, opened: OpenRound) -> bool:
        return len(opened.accepted) >= self._config.buffer

    def _candidates(self, opened: OpenRound) -> list[str]:
        return [device for device in self.free() if device not in opened.failed]

    def _vacancies(self, opened: OpenRound) -> int:
        """Number of devices that can be asked now; a device that is at work but offline does not count."""
        candidates = len(self._candidates(opened))
        if self._config.concurrency is None:
            return candidates
        at_work = sum(map(self._roster.is_online, self._roster.at_work()))
        return min(candidates, max(0, self._config.concurrency - at_work))

    def _is_stuck(self, opened: OpenRound) -> bool:
        """Return whether no device can return another result; offline devices have the grace period to return."""
        if not (opened.accepted or opened.failed):
            return False
        roster, at_work = self._roster, self._roster.at_work()
        none_online = not any(map(roster.is_online, at_work))
        grace_s = self._config.rejoin_grace_s if at_work or roster.may_answer_later() else 0.0
        return opened.is_abandoned(none_online and not self._candidates(opened), grace_s)
