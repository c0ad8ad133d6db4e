"""Rounds as in FedAvg: a cohort is drawn, and enough of its devices answer before the next round."""

import math

from coordinator.record.tables import RoundRecord, TaskRecord
from coordinator.rounds.cohort import cohort_size
from coordinator.rounds.modes.base import Mode, quorum
from coordinator.rounds.open_round import OpenRound, RoundPlan


class Synchronous(Mode):
    """One cohort after the other. A late device may still answer if the run uses late results."""

    def train(self, number: int, before: RoundRecord | None) -> OpenRound:
        config, roster, trainer, journal = self._config, self._roster, self._trainer, self._journal
        drawn: tuple[int, int] | None = None
        asked: dict[str, TaskRecord] = {}
        if before is None:
            journal.begin(number)
            trainer.wait(self._can_draw)
            free, wanted = self.free(), cohort_size(config.cohort, len(roster.online()))
            cohort = self.draw(number, free, math.ceil((1 + config.over_select) * wanted - 1e-9))
            drawn = (len(free), len(cohort))
            needed = quorum(config.quorum, min(wanted, len(cohort)))
            journal.open(number, cohort, needed)
        else:  # devices that were put into quarantine meanwhile are not awaited
            cohort = roster.admit(before.cohort) or before.cohort
            needed = before.needed or quorum(config.quorum, len(before.cohort))
            asked = {task.device: task for task in journal.find_unanswered(number)}
        # a device that is not online yet gets the recorded task, since its profile is unknown
        absent = [device for device in sorted(asked.keys() & set(cohort)) if not roster.has_seen(device)]
        recalled = trainer.recall(asked[device] for device in absent)
        planned = trainer.plan([device for device in cohort if device not in recalled])
        work = recalled | {
            device: part._replace(attempt=asked[device].attempt) if device in asked else part
            for device, part in planned.items()
        }
        if len(work) < len(cohort):
            cohort = [device for device in cohort if device in work]
            needed = min(needed, quorum(config.quorum, len(work)))
            journal.open(number, cohort, needed)
        journal.add_tasks(number, work)
        return self.ask(RoundPlan(self._run, number, "train", cohort, needed, work, drawn))

    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        """Tasks of the open round are assigned again with it."""
        return assigned_in < open_round

    def busy(self) -> list[str]:
        return self._roster.at_work()

    def _can_draw(self) -> bool:
        """Return whether a round can be opened: devices that are offline for a moment get the grace period."""
        roster = self._roster
        if not (roster.has_online() and roster.is_complete(self._config.rejoin_grace_s)):
            return False
        return bool(self.free() or self._journal.find_counted())
