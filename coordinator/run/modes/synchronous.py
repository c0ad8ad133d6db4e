"""Rounds as in FedAvg: a cohort is drawn, and enough of it answers before the next is."""

import math

from coordinator.record.tables import RoundRecord
from coordinator.run.cohort import cohort_size
from coordinator.run.open_round import OpenRound
from coordinator.run.selector import CohortSelector


class Synchronous:
    """One cohort after the other. Who is late for one may still answer it, where the run uses late results."""

    def __init__(self, asking: CohortSelector) -> None:
        self._asking = asking

    def train(self, record: RoundRecord | None) -> OpenRound:
        asking, config, number = self._asking, self._asking.config, self._asking.course.number
        drawn: tuple[int, int] | None = None
        if record is None:
            asking.results.count_in(number)
            asking.inbox.pump(lambda: asking.all_are_back() and bool(asking.free() or asking.results.counted))
            here = asking.admitted(asking.presence.online())
            free, wanted = asking.free(), cohort_size(config.cohort, len(here))
            cohort = asking.select(free, math.ceil((1 + config.over_select) * wanted - 1e-9))
            drawn = (len(free), len(cohort))
            needed = asking.quorum(min(wanted, len(cohort)))
            asking.store.open_round(asking.run, number, cohort, needed)
        else:  # who is in quarantine since need not be waited for
            cohort = asking.admitted(record.cohort) or record.cohort
            needed = record.needed or asking.quorum(len(record.cohort))
        work = asking.work(cohort)
        if len(work) < len(cohort):
            cohort, needed = list(work), min(needed, asking.quorum(len(work)))
            asking.store.open_round(asking.run, number, cohort, needed)
        asking.record_tasks(work)
        return asking.ask(OpenRound(asking.run, number, "train", cohort, needed, work, drawn))

    def goes_on(self, assigned_in: int, open_round: int) -> bool:
        """Tasks of the open round are made again with it."""
        return assigned_in < open_round

    def busy(self) -> list[str]:
        return [assignment.device for assignment in self._asking.assignments]
