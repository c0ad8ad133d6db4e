"""The orders in which rounds follow each other."""

from coordinator.rounds.modes.base import Mode
from coordinator.rounds.modes.buffered import Buffered
from coordinator.rounds.modes.synchronous import Synchronous

MODES: dict[str, type[Mode]] = {"rounds": Synchronous, "buffered": Buffered}
"""By `mode` of a run's configuration."""
