"""The repository of rounds."""

import math

import pytest

from coordinator.record.record import Record
from coordinator.record.rounds import RoundWork
from coordinator.record.tables import SavedState, TaskRecord
from fedvit.errors import StorageFailed
from tests.support.records import DIGEST, make_result, reopen


def test_rounds_come_back(store: Record) -> None:
    state = SavedState({"global": DIGEST, "head": DIGEST}, DIGEST, {"pi": DIGEST})
    store.rounds.open("r", 2, ["b", "a"])
    store.rounds.open("r", 1, ["a"])
    store.rounds.close("r", 1, state, {"loss": 0.5, "took_s": 3.0})
    store.rounds.close_evaluation("r", 1)
    store.runs.create("other", {})
    store.rounds.open("other", 1, ["x"])
    first, second = reopen(store).rounds.read_all("r")
    assert (first.run, first.round, first.cohort, first.evaluated) == ("r", 1, ["a"], True)
    assert (first.state, first.figures) == (state, {"loss": 0.5, "took_s": 3.0})
    assert first.closed_at is not None
    assert first.closed_at >= first.opened_at
    assert (second.round, second.cohort, second.closed_at) == (2, ["b", "a"], None)
    assert (second.state, second.figures, second.evaluated) == (None, {}, False)


def test_a_round_asked_anew_has_the_new_cohort(store: Record) -> None:
    store.rounds.open("r", 1, ["a"])
    store.rounds.open("r", 1, ["b", "c"])
    [record] = store.rounds.read_all("r")
    assert (record.cohort, record.closed_at) == (["b", "c"], None)


def test_a_round_of_no_run_cannot_be_opened(store: Record) -> None:
    with pytest.raises(StorageFailed):
        store.rounds.open("nope", 1, ["a"])


def test_round_is_summed_up_from_results_in_memory_as_from_the_record(store: Record) -> None:
    """The record holds the rows that `add_results` returns, so a round does not read them again."""
    tested = {"kind": "evaluate", "samples": 5, "metrics": {"correct": 4.0}, "upload": None}
    for number, is_in_memory in ((1, True), (2, False)):
        store.rounds.open("r", number, ["a", "b"])
        store.tasks.add("r", [TaskRecord(number, name, DIGEST, {}) for name in ("a", "b")])
        trained = store.tasks.add_results(
            [("b", make_result(number), number), ("a", make_result(number, samples=7), number)]
        )
        assert sorted(trained, key=lambda entry: entry.device) == store.tasks.read_used_in("r", number)
        store.rounds.close(
            "r", number, SavedState({}, None, {}), {}, RoundWork(results=trained if is_in_memory else None)
        )
        evaluated = store.tasks.add_results([("a", make_result(number, **tested), None)])
        store.rounds.close_evaluation("r", number, evaluated if is_in_memory else None)
    again = reopen(store)
    first, second = again.rounds.read("r", 1), again.rounds.read("r", 2)
    assert first is not None
    assert second is not None
    assert (first.totals, first.accuracy) == (second.totals, second.accuracy)
    assert first.totals is not None
    assert (first.totals.accepted, first.totals.accuracy_mean) == (2, 0.8)
    assert [entry.totals.results for entry in again.devices.read_all("r")] == [4, 2]


def test_numbers_that_are_not_finite_come_back(store: Record) -> None:
    """A round whose loss is not a number, and one that has none: both are counted by their figures."""
    for number, figures in enumerate([{"loss": math.nan, "noise": 1.0}, {"up": -math.inf, "noise": 1.0}, {}], start=1):
        store.rounds.open("r", number, ["a"])
        store.rounds.close("r", number, None, figures)
    first, second, _ = store.rounds.read_all("r")
    assert math.isnan(first.figures["loss"])
    assert second.figures["up"] == -math.inf
    assert store.rounds.count_figures("r", ["noise"]) == {(1.0,): 2, (None,): 1}
    assert [record.round for record in reopen(store).rounds.read_all("r")] == [1, 2, 3]
