"""Which devices a round asks, of a run's real state: presence, tasks, quarantine and the record."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.config import RobustConfig, make_config
from coordinator.record.record import open_record
from coordinator.rounds.quarantine import Quarantine
from coordinator.rounds.selector import CohortSelector
from coordinator.rounds.state import RunState
from fedvit.errors import LinkDown
from fedvit.wire.messages import DeviceState
from fedvit.wire.topics import Topics
from tests.support.messages import hello

MakeState = Callable[..., RunState]


@pytest.fixture
def make_state(tmp_path: Path) -> Iterator[MakeState]:
    """A run in its first round, and five devices that are here."""
    store = open_record(tmp_path)
    store.runs.create("r", {})

    def make(**values: Any) -> RunState:
        state = RunState(
            run="r",
            config=make_config({"method": "fedavg", **values}, "test").run,
            store=store,
            blobs=VerifiedBlobs(tmp_path / "blobs"),
            topics=Topics("home"),
            operator_log=lambda line: None,
            send=lambda device, message: None,
            classes=("ant", "bee"),
        )
        for name in "abcde":
            state.presence.arrived(name, hello(f"{name}1"))
        return state

    yield make
    store.close()


def selector_of(state: RunState) -> CohortSelector:
    return CohortSelector(state, Quarantine("r", state.store, RobustConfig(strikes=1)))


def test_selector_takes_devices_that_are_here_admitted_and_have_no_result_yet(make_state: MakeState) -> None:
    state = make_state()
    selector = selector_of(state)
    assert selector.free() == ["a", "b", "c", "d", "e"]
    state.presence.state_changed("b", DeviceState("b1", online=False))
    state.counted.add("c")
    Quarantine("r", state.store, RobustConfig(strikes=1)).strike("d", 1, "not finite")
    state.number = 2
    assert selector_of(state).free() == ["a", "e"]


def test_selector_waits_for_devices_that_may_come_back(make_state: MakeState) -> None:
    state = make_state(rejoin_grace_s=600.0)
    selector = selector_of(state)
    assert selector.all_are_back()
    state.presence.state_changed("a", DeviceState("a1", online=False))
    assert not selector.all_are_back()
    state.presence.arrived("a", hello("a2"))
    assert selector.all_are_back()


@pytest.mark.parametrize(("quorum", "cohort", "needed"), [(1.0, 5, 5), (0.6, 5, 3), (0.5, 5, 3), (0.01, 5, 1)])
def test_selector_rounds_a_quorum_up(make_state: MakeState, quorum: float, cohort: int, needed: int) -> None:
    assert selector_of(make_state(quorum=quorum)).quorum(cohort) == needed


def test_selector_draws_the_devices_that_test_apart_from_those_that_train(make_state: MakeState) -> None:
    """As many as the share says; over twenty rounds the two cohorts are not always the same."""
    state = make_state(evaluation_cohort=0.4, evaluation_quorum=0.5)
    selector, names = selector_of(state), list("abcde")
    differ = 0
    for state.number in range(1, 21):
        cohort, needed = selector.select_for_evaluation(names)
        assert (len(cohort), needed) == (2, 1)
        differ += cohort != selector.select(names, 2)
    assert differ > 5


def test_run_state_that_is_not_prepared_raises(make_state: MakeState) -> None:
    with pytest.raises(LinkDown, match="not prepared yet"):
        make_state().newest()


@pytest.mark.parametrize(
    ("values", "waits"), [({}, False), ({"late": "discount"}, True), ({"mode": "buffered", "late": "discount"}, False)]
)
def test_run_state_waits_for_late_results_of_trainings_where_the_run_uses_them(
    make_state: MakeState, values: dict[str, Any], waits: bool
) -> None:
    state = make_state(**values)
    assert state.waits_for_late("train") is waits
    assert not state.waits_for_late("evaluate")
