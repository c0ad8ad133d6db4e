"""Rounds without a cohort: FedBuff (Nguyen et al. 2022). Whoever is free works; enough results make a server step."""

from coordinator.record.tables import RoundRecord
from coordinator.run.open_round import OpenRound
from coordinator.run.selector import CohortSelector


class Buffered:
    """Devices are asked as they become free, until there are `buffer` results.

    A device counts once in a round, and is asked once for it: its draws follow from the round, so that it would
    bring the same again.
    """

    def __init__(self, asking: CohortSelector) -> None:
        self._asking = asking

    def train(self, record: RoundRecord | None) -> OpenRound:
        asking, number, wanted = self._asking, self._asking.course.number, self._asking.config.buffer
        asked = list(record.cohort) if record else []
        asking.store.open_round(asking.run, number, asked, wanted)
        at_work = {assignment.device for assignment in asking.assignments}
        opened = OpenRound(asking.run, number, "train", sorted(at_work), wanted)
        asking.begin(opened)
        opened.cohort = sorted(at_work | asking.results.counted)
        opened.accepted |= asking.results.counted
        while True:
            asking.inbox.pump(lambda: self._is_full(opened) or self._vacancies(opened) > 0 or self._is_stuck(opened))
            if self._is_full(opened) or not (vacancies := self._vacancies(opened)):
                break
            work = asking.work(asking.select(self._candidates(opened), vacancies))
            asked += work
            asking.store.open_round(asking.run, number, asked, wanted)
            opened.work |= work
            asking.record_tasks(work)
            opened.cohort = sorted({*opened.cohort, *work})
            for device, part in work.items():
                asking.dispatch.give(device, number, "train", part)
        asking.end(opened)
        return opened

    def goes_on(self, assigned_in: int, open_round: int) -> bool:
        return True

    def busy(self) -> list[str]:
        """Nobody: somebody always is at work, so all are asked when they have answered, and nobody trains meanwhile."""
        return []

    def _is_full(self, opened: OpenRound) -> bool:
        return len(opened.accepted) >= self._asking.config.buffer

    def _candidates(self, opened: OpenRound) -> list[str]:
        return [device for device in self._asking.free() if device not in opened.failed]

    def _vacancies(self, opened: OpenRound) -> int:
        """How many devices can be asked now; who is at work but offline takes no place."""
        asking, candidates = self._asking, len(self._candidates(opened))
        if asking.config.concurrency is None:
            return candidates
        at_work = sum(asking.presence.is_online(assignment.device) for assignment in asking.assignments)
        return min(candidates, max(0, asking.config.concurrency - at_work))

    def _is_stuck(self, opened: OpenRound) -> bool:
        """Whether nobody is left who could bring another result; those who may come back have the grace to do so."""
        if not (opened.accepted or opened.failed):
            return False
        asking, at_work = self._asking, list(self._asking.assignments)
        nobody = not any(asking.presence.is_online(assignment.device) for assignment in at_work)
        grace_s = asking.config.rejoin_grace_s if at_work or asking.presence.resting() else 0.0
        return opened.alone(nobody and not self._candidates(opened), grace_s)
