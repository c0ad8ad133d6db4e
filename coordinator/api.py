"""The commands of the coordinator as functions and flags, for programs that serve runs of their own."""

from coordinator.commands.config_flags import config_flags, merge_flags
from coordinator.commands.flags import existing_store, record_flag, runs_flag
from coordinator.commands.show import print_run
from coordinator.commands.start import run_to_end, usual_name

__all__ = [
    "config_flags",
    "existing_store",
    "merge_flags",
    "print_run",
    "record_flag",
    "run_to_end",
    "runs_flag",
    "usual_name",
]
