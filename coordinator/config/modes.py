"""The modes of rounds, one row each."""

from typing import NamedTuple


class ModeRow(NamedTuple):
    """A mode, and the property that decides which other keys fit it."""

    implementation: str  # module and class, a `Mode`
    discounts_late_results: bool = False  # whatever the key `late` says


MODES = {
    "rounds": ModeRow("coordinator.rounds.modes.synchronous:Synchronous"),
    "buffered": ModeRow("coordinator.rounds.modes.buffered:Buffered", discounts_late_results=True),
}
"""By `mode` of a run's configuration."""
