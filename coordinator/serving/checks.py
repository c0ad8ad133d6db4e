"""Checks of a new run that need the record alone: for `coordinator start`, and for `submit`, which is often called."""

from coordinator.config import RunConfig
from coordinator.record.record import Record
from coordinator.record.runs import make_exists_error
from coordinator.record.scores import find_start
from coordinator.views.trackers.following import check_writers
from fedvit.errors import ConfigError


def check_new(store: Record | None, run: str) -> None:
    """Raise ConfigError if the run exists."""
    if store and run in {record.id for record in store.runs.read_all()}:
        raise make_exists_error(run)


def check_trackers(config: RunConfig, where: str) -> None:
    """Raise ConfigError if the library of a metrics writer is missing."""
    if config.trackers.writers:
        check_writers(config.trackers, where)


def check_start_from(store: Record | None, config: RunConfig) -> None:
    """Raise ConfigError if the run of `start_from` does not exist, or does not keep the round."""
    if config.start_from is None:
        return
    if store is None:
        raise ConfigError("FV1115", f"start_from = {config.start_from!r}: there is no run yet")
    find_start(store, config.start_from, config.start_round)
