"""A record made by hand, that tests let grow."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.config import RunConfig, make_config
from coordinator.record.record import Record
from coordinator.record.tables import SavedState
from tests.support.records import RUN, begin_run, evaluated


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    """Of the run's three rounds the first is closed, the second is open."""
    made = begin_run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def configured(store: Record) -> Callable[..., RunConfig]:
    """The run's configuration, with a table [metrics]."""

    def configured(*writers: str, **metrics: str) -> RunConfig:
        return make_config({**store.runs.read(RUN).config, "trackers": {"writers": writers, **metrics}}, "test").run

    return configured


@pytest.fixture
def close_round(store: Record) -> Callable[[int], None]:
    """Close a round, in which device a answers half of its test images rightly."""

    def close_round(number: int) -> None:
        if store.rounds.read(RUN, number) is None:
            store.rounds.open(RUN, number, ["a"])
        store.rounds.close(
            RUN, number, SavedState({}, None, {}), {"devices_s": 1.0, "server_s": 0.25, "dp_epsilon": 1.5}
        )
        evaluated(store, number, "a", 1, 2)
        store.rounds.close_evaluation(RUN, number)

    return close_round
