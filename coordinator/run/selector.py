"""Which devices a round asks, and how many of them have to answer."""

import math
from collections.abc import Iterable

from coordinator.record.privacy import cohort_seed
from coordinator.run.cohort import cohort_size, select_fair, select_uniform
from coordinator.run.quarantine import Quarantine
from coordinator.run.state import RunState

EVALUATION_DRAW = 1
"""Beside the seed, so that the devices which test are not those which train."""


class CohortSelector:
    """One run's."""

    def __init__(self, state: RunState, quarantine: Quarantine) -> None:
        self._state = state
        self._quarantine = quarantine

    def admitted(self, devices: Iterable[str]) -> list[str]:
        """Those that no quarantine keeps out of the round."""
        return self._quarantine.admitted(devices, self._state.number)

    def available(self) -> list[str]:
        """Devices that are here, do not rest, and are admitted."""
        return self.admitted(self._state.presence.available())

    def free(self) -> list[str]:
        """Devices that can be asked for the round that counts now."""
        state = self._state
        return [device for device in self.available() if device not in state.tasks and device not in state.counted]

    def all_are_back(self) -> bool:
        """Whether a round can be opened: not for the first that returns after all were gone for a moment."""
        presence = self._state.presence
        return bool(presence.count_online()) and not presence.may_return(self._state.config.rejoin_grace_s)

    def select(self, devices: list[str], wanted: int) -> list[str]:
        """The cohort of the round, out of these."""
        state, config = self._state, self._state.config
        if config.selection == "fair":
            return select_fair(devices, wanted, config.seed, state.number, state.store.asked(state.run))
        return select_uniform(devices, wanted, cohort_seed(config), state.number)

    def select_for_evaluation(self, devices: list[str]) -> tuple[list[str], int]:
        """Those of the devices that test, and how many of them have to answer."""
        config = self._state.config
        wanted = cohort_size(config.evaluation_cohort, len(devices))
        cohort = select_uniform(devices, wanted, config.seed, self._state.number, EVALUATION_DRAW)
        return cohort, _share(config.evaluation_quorum, len(cohort))

    def quorum(self, cohort: int) -> int:
        """Results of a cohort of that size that close a round at once."""
        return _share(self._state.config.quorum, cohort)


def _share(share: float, devices: int) -> int:
    return max(1, math.ceil(share * devices - 1e-9))
