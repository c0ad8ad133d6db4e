"""How rounds follow each other."""

from coordinator.asking import Mode
from coordinator.modes.buffered import Buffered
from coordinator.modes.synchronous import Synchronous

MODES: dict[str, type[Mode]] = {"rounds": Synchronous, "buffered": Buffered}
"""By `mode` of a run's configuration."""
