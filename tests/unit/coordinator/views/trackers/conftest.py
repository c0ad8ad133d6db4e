"""A record made by hand, that tests let grow."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.config import RunConfig, make_config
from coordinator.record.store import Store
from coordinator.record.tables import SavedState
from tests.support.records import RUN, begun_run, evaluated


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of the run's three rounds the first is closed, the second is open."""
    made = begun_run(tmp_path)
    yield made
    made.close()


@pytest.fixture
def configured(store: Store) -> Callable[..., RunConfig]:
    """The run's configuration, with a table [trackers]."""

    def configured(*writers: str, **metrics: str) -> RunConfig:
        return make_config({**store.run(RUN).config, "trackers": {"writers": writers, **metrics}}, "test").run

    return configured


@pytest.fixture
def close_round(store: Store) -> Callable[[int], None]:
    """Close a round, in which device a answers half of its test images rightly."""

    def close_round(number: int) -> None:
        if store.round(RUN, number) is None:
            store.open_round(RUN, number, ["a"])
        store.close_round(
            RUN, number, SavedState({}, None, {}), {"devices_s": 1.0, "server_s": 0.25, "dp_epsilon": 1.5}
        )
        evaluated(store, number, "a", 1, 2)
        store.round_evaluated(RUN, number)

    return close_round
