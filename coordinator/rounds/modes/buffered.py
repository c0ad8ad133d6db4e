"""Rounds without a cohort: FedBuff (Nguyen et al. 2022). Free devices train; `buffer` results make a server step."""

from coordinator.record.tables import RoundRecord
from coordinator.rounds.open_round import OpenRound
from coordinator.rounds.round_runner import RoundRunner


class Buffered:
    """Devices are asked as they become free, until there are `buffer` results.

    A device is asked and counts only once per round: its random draws follow from the round, so that it would return
    the same result again.
    """

    def __init__(self, runner: RoundRunner) -> None:
        self._runner = runner

    def train(self, record: RoundRecord | None) -> OpenRound:
        runner, state, wanted = self._runner, self._runner.state, self._runner.state.config.buffer
        asked = list(record.cohort) if record else []
        state.store.rounds.open(state.run, state.number, asked, wanted)
        opened = OpenRound(state.run, state.number, "train", (task.device for task in state.tasks), wanted)
        runner.open(opened)
        opened.extend(state.counted)
        for device in state.counted:
            opened.accept(device)
        while True:
            runner.wait(lambda: self._is_full(opened) or self._vacancies(opened) > 0 or self._is_stuck(opened))
            if self._is_full(opened) or not (vacancies := self._vacancies(opened)):
                break
            work = runner.plan(runner.selector.select(self._candidates(opened), vacancies))
            asked += work
            state.store.rounds.open(state.run, state.number, asked, wanted)
            opened.work |= work
            runner.record_tasks(work)
            opened.extend(work)
            for device, part in work.items():
                runner.assign(device, state.number, "train", part)
        runner.close(opened)
        return opened

    def continues_task(self, assigned_in: int, open_round: int) -> bool:
        return True

    def busy(self) -> list[str]:
        """None: some device is always at work, so all are evaluated once they have answered, and none trains then."""
        return []

    def _is_full(self, opened: OpenRound) -> bool:
        return len(opened.accepted) >= self._runner.state.config.buffer

    def _candidates(self, opened: OpenRound) -> list[str]:
        return [device for device in self._runner.selector.free() if device not in opened.failed]

    def _vacancies(self, opened: OpenRound) -> int:
        """How many devices can be asked now; a device that is at work but offline does not count."""
        state, candidates = self._runner.state, len(self._candidates(opened))
        if state.config.concurrency is None:
            return candidates
        at_work = sum(state.presence.is_online(task.device) for task in state.tasks)
        return min(candidates, max(0, state.config.concurrency - at_work))

    def _is_stuck(self, opened: OpenRound) -> bool:
        """Whether no device can return another result; offline devices have the grace period to return."""
        if not (opened.accepted or opened.failed):
            return False
        state, at_work = self._runner.state, list(self._runner.state.tasks)
        none_online = not any(state.presence.is_online(task.device) for task in at_work)
        grace_s = state.config.rejoin_grace_s if at_work or state.presence.backing_off() else 0.0
        return opened.abandoned(none_online and not self._candidates(opened), grace_s)
