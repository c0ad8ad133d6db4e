"""The commands of the coordinator as functions and flags, for programs that serve runs of their own."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coordinator.commands.config_flags import config_flags
from coordinator.commands.flags import record_flag, runs_flag
from coordinator.commands.show import print_run
from coordinator.config import merge_flags
from coordinator.record.opening import open_existing_record
from coordinator.serving.request import StartRequest, usual_name

if TYPE_CHECKING:
    from coordinator.rounds.leading import Lead
    from coordinator.rounds.parts import RunParts

__all__ = [
    "config_flags",
    "merge_flags",
    "open_existing_record",
    "print_run",
    "record_flag",
    "run_to_end",
    "runs_flag",
    "usual_name",
]


def run_to_end(*, flags: dict[str, Any], lead: "Callable[[RunParts], Lead]", **options: Any) -> None:
    """Serve the run of a region to its end, with the options of `coordinator start` and the keys of its configuration.

    Raises FedvitError if the run cannot begin or continue, click.Abort if it is interrupted.
    """
    import_module("coordinator.serving.start").start_run(StartRequest.from_flags({**options, **flags}), lead)
