"""The rules of [stop], and the best round."""

import pytest

from coordinator.config.stop import StopConfig
from coordinator.record.record import Record
from coordinator.record.scores import NEXT_EPSILON, RoundScores, find_round
from coordinator.record.tables import SavedState
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.devices import result as make_result

SAVED = SavedState({"model": "blake3:" + "ab" * 32}, None, {})


def follow(stop: StopConfig, accuracies: list[float | None], figures: dict[str, float] | None = None) -> RoundScores:
    """Add rounds until a rule holds."""
    scores = RoundScores(stop)
    for number, accuracy in enumerate(accuracies, 1):
        scores.close(number, figures or {})
        scores.evaluate(number, accuracy)
        if scores.reason:
            break
    return scores


@pytest.mark.parametrize(
    ("stop", "accuracies", "stops_in", "best"),
    [
        (StopConfig(), [0.1, 0.9, 0.2], None, 2),
        (StopConfig(accuracy=0.6), [0.5, None, 0.6, 0.7], 3, 3),
        (StopConfig(patience=2), [0.5, 0.6, None, 0.6, 0.5, 0.9], 5, 2),
        (StopConfig(patience=3), [0.5, 0.4, 0.4, 0.6, 0.5, 0.5], None, 4),
        (StopConfig(accuracy=0.5, patience=1), [0.4, 0.3], 2, 1),
    ],
)
def test_scores_stops(stop: StopConfig, accuracies: list[float | None], stops_in: int | None, best: int) -> None:
    scores = follow(stop, accuracies)
    assert scores.best == best
    assert (scores.reason is None) == (stops_in is None)
    assert stops_in is None or f"round {stops_in}" in str(scores.reason)


def test_scores_stops_by_time_and_before_epsilon_would_be_exceeded() -> None:
    scores = follow(StopConfig(seconds=10), [0.1] * 9, {"devices_s": 3.0, "server_s": 1.0})
    assert "round 3" in str(scores.reason)
    assert follow(StopConfig(epsilon=8), [0.1], {NEXT_EPSILON: 8.0}).reason is None
    assert "round 1" in str(follow(StopConfig(epsilon=8), [0.1], {NEXT_EPSILON: 8.1}).reason)


def test_find_round_knows_what_is_kept(store: Record) -> None:
    store.runs.create("run", {"method": "fedavg", "stop": {"patience": 3}})
    with pytest.raises(ConfigError, check=has_code("FV1623")):
        find_round(store, "run", None)
    for number, correct in ((1, 3), (2, 8), (3, 5)):
        store.rounds.open("run", number, ["a"])
        store.rounds.close("run", number, SAVED, {})
        evaluation = make_result(number, run="run", kind="evaluate", samples=10, metrics={"correct": float(correct)})
        store.rounds.close_evaluation("run", number, store.tasks.add_results([("a", evaluation, None)]))
    store.runs.thin("run", 3, keep=2)
    assert [find_round(store, "run", asked).round for asked in (None, "best", "last", 2, 3)] == [2, 2, 3, 2, 3]
    with pytest.raises(ConfigError, check=has_code("FV1645", "round 2, its best")):
        find_round(store, "run", 1)
    store.runs.update("run", config={"method": "fedavg"})
    assert find_round(store, "run", None).round == 3
    with pytest.raises(ConfigError, check=has_code("FV1645", "[stop]")):
        find_round(store, "run", "best")
