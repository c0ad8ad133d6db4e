"""Rounds as in FedAvg: a cohort is drawn, and enough of its devices answer before the next round."""

import math

from coordinator.record.tables import RoundRecord, TaskRecord
from coordinator.rounds.cohort import cohort_size
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.round_runner import RoundRunner


class Synchronous:
    """One cohort after the other. A late device may still answer if the run uses late results."""

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner

    def train(self, record: RoundRecord | None) -> OpenRound:
        runner, state, selector = self._runner, self._runner.state, self._runner.selector
        drawn: tuple[int, int] | None = None
        asked: dict[str, TaskRecord] = {}
        if record is None:
            state.count_in(state.number)
            runner.wait(lambda: selector.all_are_back() and bool(selector.free() or state.counted))
            online = selector.admitted(state.presence.online())
            free, wanted = selector.free(), cohort_size(state.config.cohort, len(online))
            cohort = selector.select(free, math.ceil((1 + state.config.over_select) * wanted - 1e-9))
            drawn = (len(free), len(cohort))
            needed = selector.quorum(min(wanted, len(cohort)))
            state.store.rounds.open(state.run, state.number, cohort, needed)
        else:  # devices that were put into quarantine meanwhile are not awaited
            cohort = selector.admitted(record.cohort) or record.cohort
            needed = record.needed or selector.quorum(len(record.cohort))
            asked = {task.device: task for task in state.store.tasks.read_unanswered(state.run, state.number)}
        # a device that is not online yet gets the recorded task, since its profile is unknown
        absent = set(cohort) - state.presence.names() if asked else set()
        known = runner.recorded(asked[device] for device in sorted(absent & asked.keys()))
        planned = runner.plan([device for device in cohort if device not in known])
        work = known | {
            device: part._replace(attempt=asked[device].attempt) if device in asked else part
            for device, part in planned.items()
        }
        if len(work) < len(cohort):
            cohort, needed = [device for device in cohort if device in work], min(needed, selector.quorum(len(work)))
            state.store.rounds.open(state.run, state.number, cohort, needed)
        runner.record_tasks(work)
        return runner.ask(OpenRound(state.run, state.number, "train", cohort, needed, work, drawn))

    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        """Tasks of the open round are assigned again with it."""
        return assigned_in < open_round

    def busy(self) -> list[str]:
        return [task.device for task in self._runner.state.tasks]
