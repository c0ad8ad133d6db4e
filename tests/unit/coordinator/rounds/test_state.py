"""What a run remembers of its rounds, beside the record."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from coordinator.compute.integrity import VerifiedBlobs
from coordinator.config import make_config
from coordinator.record.record import Record, open_record
from coordinator.rounds.lease import Lease
from coordinator.rounds.open_round import OpenRound, RoundPlan
from coordinator.rounds.state import RunState
from fedvit.errors import LinkDown
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import TaskKind
from fedvit.wire.topics import Topics
from tests.support.devices import hello, result


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with open_record(tmp_path) as opened:
        opened.runs.create("run", {})
        yield opened


def state_of(store: Record, folder: Path, **values: Any) -> RunState:
    return RunState(
        run="run",
        config=make_config({"method": "fedavg", **values}, "test").run,
        store=store,
        blobs=VerifiedBlobs(folder / "blobs"),
        topics=Topics("home"),
        operator_log=lambda line: None,
        send=lambda device, message: None,
        classes=("ant", "bee"),
    )


def accept(state: RunState, device: str, number: int, used_in: int | None, kind: TaskKind = "train") -> None:
    metrics = {"loss": 1.0} if kind == "train" else {"correct": 3.0}
    state.add_results(state.store.tasks.add_results([(device, result(number, kind=kind, metrics=metrics), used_in)]))


def open_round(state: RunState, number: int, kind: TaskKind) -> None:
    state.open(OpenRound(RoundPlan("run", number, kind, ["a", "b", "c"], 3)))


def test_results_of_a_round_are_read_from_the_record_once(store: Record, tmp_path: Path) -> None:
    """When it opens: those of an earlier process, and late ones. Those that follow are remembered, without another read
    of the record."""
    accept(state_of(store, tmp_path), "b", 1, 2)
    state = state_of(store, tmp_path)
    open_round(state, 2, "train")
    assert state.counted == {"b"}
    accept(state, "c", 2, 2)
    accept(state, "a", 2, 2)
    accept(state, "a", 2, 2)  # sent twice
    expected = store.tasks.read_used_in("run", 2)
    with closing(sqlite3.connect(tmp_path / "fedvit.db")) as database, database:
        database.execute("DELETE FROM results")
    assert state.results(2, "train") == expected
    assert [(entry.device, entry.round) for entry in expected] == [("b", 1), ("a", 2), ("c", 2)]


def test_results_of_a_closed_round_stay_until_the_next_one_has_closed(store: Record, tmp_path: Path) -> None:
    """They are summed up when the server step is done; meanwhile results count in the next round."""
    state = state_of(store, tmp_path)
    for number in (1, 2, 3):
        open_round(state, number, "train")
        accept(state, "a", number, number)
        state.count_in(number + 1)
        accept(state, "b", number, number + 1)
        open_round(state, number, "evaluate")
        accept(state, "a", number, None, "evaluate")
        rounds = [1] if number == 1 else [number - 1, number]
        assert [entry.round for entry in state.results(number, "train")] == rounds
        assert [entry.device for entry in state.results(number, "evaluate")] == ["a"]
    assert {number for number, _ in state._results} == {3, 4}


def test_hellos_are_spread_by_the_size_of_the_fleet(store: Record, tmp_path: Path) -> None:
    """As the run expects it, or as it has been seen."""
    state = state_of(store, tmp_path)
    assert state.spread_s == 1.0
    for number in range(1000):
        state.presence.arrived(f"d{number}", hello())
    state.presence.all_offline()
    assert state.spread_s == 2.0
    lease = Lease(MemoryTransport(SimpleQueue(), MemoryBroker(), "c"), state.topics, "run", print)
    lease.renew(state.spread_s)
    assert lease.state().spread_s == 2.0


def test_results_that_were_not_loaded_are_read_when_they_are_needed(store: Record, tmp_path: Path) -> None:
    """A process that begins between the training and the evaluation of a round without devices."""
    accept(state_of(store, tmp_path), "a", 1, None, "evaluate")
    assert [entry.device for entry in state_of(store, tmp_path).results(1, "evaluate")] == ["a"]


def test_run_state_that_is_not_prepared_raises(store: Record, tmp_path: Path) -> None:
    with pytest.raises(LinkDown):
        state_of(store, tmp_path).newest()


@pytest.mark.parametrize(
    ("values", "waits"), [({}, False), ({"late": "discount"}, True), ({"mode": "buffered", "late": "discount"}, False)]
)
def test_run_state_waits_for_late_results_of_trainings_where_the_run_uses_them(
    store: Record, tmp_path: Path, values: dict[str, Any], waits: bool
) -> None:
    state = state_of(store, tmp_path, **values)
    assert state.waits_for_late("train") is waits
    assert not state.waits_for_late("evaluate")
