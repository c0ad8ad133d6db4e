"""The modes of rounds, one row each."""

from typing import NamedTuple


class ModeRow(NamedTuple):
    """A mode, and the properties that decide which other keys fit it."""

    implementation: str  # module and class, a `Mode`
    asks_cohorts: bool = True  # a round has the results of one cohort, as regions, sums and simulations on torch need
    discounts_late_results: bool = False  # whatever the key `late` says


MODES = {
    "rounds": ModeRow("coordinator.rounds.modes.synchronous:Synchronous"),
    "buffered": ModeRow("coordinator.rounds.modes.buffered:Buffered", asks_cohorts=False, discounts_late_results=True),
}
"""By `mode` of a run's configuration."""
