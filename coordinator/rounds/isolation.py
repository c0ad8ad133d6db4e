"""Errors that end a run, as opposed to those that end only the task of one device."""

from coordinator.rounds.inbox import Interrupted
from fedvit.descriptors import USED_UP
from fedvit.errors import StorageFailed


def ends_run(error: Exception) -> bool:
    """Return whether an error in handling a device's message ends the run: the record or the disk cannot be used, or
    the operator asked to stop."""
    return isinstance(error, StorageFailed | Interrupted) or (isinstance(error, OSError) and error.errno in USED_UP)
