"""How rounds follow each other."""

from coordinator.rounds.modes.buffered import Buffered
from coordinator.rounds.modes.synchronous import Synchronous
from coordinator.rounds.round_runner import Mode

MODES: dict[str, type[Mode]] = {"rounds": Synchronous, "buffered": Buffered}
"""By `mode` of a run's configuration."""
