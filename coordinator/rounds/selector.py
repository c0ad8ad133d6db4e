"""Selects the devices of a round, and how many of them have to answer."""

import math
from collections.abc import Iterable

from coordinator.record.privacy import cohort_seed
from coordinator.rounds.cohort import cohort_size, select_fair, select_uniform
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.state import RunState

EVALUATION_DRAW = 1
"""Added to the seed, so that the devices that test are drawn independently of those that train."""


class CohortSelector:
    """Selects the cohorts of one run."""

    def __init__(self, state: RunState, quarantine: Quarantine) -> None:
        self._state = state
        self._quarantine = quarantine

    def admitted(self, devices: Iterable[str]) -> list[str]:
        """Return the devices that are neither revoked nor in quarantine."""
        allowed = [device for device in devices if device not in self._state.revoked]
        return self._quarantine.admitted(allowed, self._state.number)

    def available(self) -> list[str]:
        """Devices that are online, not in a backoff, and not in quarantine."""
        return self.admitted(self._state.presence.available())

    def free(self) -> list[str]:
        """Available devices without a task and without a result for the current round."""
        state = self._state
        return [device for device in self.available() if device not in state.tasks and device not in state.counted]

    def all_are_back(self) -> bool:
        """Whether a round can be opened: devices that are offline for a moment get the grace period to return."""
        presence = self._state.presence
        return bool(presence.count_online()) and not presence.may_return(self._state.config.rejoin_grace_s)

    def select(self, devices: list[str], wanted: int) -> list[str]:
        """Select the cohort of the round from these devices."""
        state, config = self._state, self._state.config
        if config.selection == "fair":
            return select_fair(devices, wanted, config.seed, state.number, state.store.devices.read_asked(state.run))
        return select_uniform(devices, wanted, cohort_seed(config), state.number)

    def select_for_evaluation(self, devices: list[str]) -> tuple[list[str], int]:
        """Select the devices that test; returns them, and how many have to answer."""
        config = self._state.config
        wanted = cohort_size(config.evaluation_cohort, len(devices))
        cohort = select_uniform(devices, wanted, config.seed, self._state.number, EVALUATION_DRAW)
        return cohort, _share(config.evaluation_quorum, len(cohort))

    def quorum(self, cohort: int) -> int:
        """Number of results that close a round with a cohort of this size."""
        return _share(self._state.config.quorum, cohort)


def _share(share: float, devices: int) -> int:
    return max(1, math.ceil(share * devices - 1e-9))
