"""How rounds follow each other."""

from coordinator.run.modes.buffered import Buffered
from coordinator.run.modes.synchronous import Synchronous
from coordinator.run.round_runner import Mode

MODES: dict[str, type[Mode]] = {"rounds": Synchronous, "buffered": Buffered}
"""By `mode` of a run's configuration."""
