"""Which errors end a run, and which end only the task of one device."""

from coordinator.rounds.inbox import Interrupted
from fedvit.descriptors import USED_UP
from fedvit.errors import StorageFailed


def ends_run(error: Exception) -> bool:
    """Whether an error in handling a device's message concerns the whole run: the record or the disk cannot be used, or
    the operator asked to stop."""
    return isinstance(error, StorageFailed | Interrupted) or (isinstance(error, OSError) and error.errno in USED_UP)
