"""Counts of two models on the same images, and the intervals that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.comparison import Comparison, as_metrics, read_metrics

COUNTS = st.builds(Comparison, *(st.integers(0, 5000) for _ in range(4)))


def swap(compared: Comparison) -> Comparison:
    return Comparison(compared.both, compared.only_champion, compared.only_challenger, compared.neither)


@given(COUNTS)
def test_gain_is_antisymmetric_and_lies_within_its_interval(compared: Comparison) -> None:
    interval, other = compared.gain_interval(), swap(compared).gain_interval()
    assert -1 <= interval.low <= interval.high <= 1
    assert interval.low <= compared.gain * compared.images / (compared.images + 2) <= interval.high
    assert (other.low, other.high) == pytest.approx((-interval.high, -interval.low))


@given(COUNTS)
def test_more_images_of_the_same_kind_narrow_the_interval(compared: Comparison) -> None:
    before, after = compared.gain_interval(), (compared + compared + compared + compared).gain_interval()
    assert after.high - after.low < before.high - before.low or compared.images == 0


@given(st.integers(0, 400), st.integers(0, 400))
def test_decision_is_that_of_mcnemars_test_where_images_are_many(better: int, worse: int) -> None:
    compared = Comparison(9_000, better, worse, 1_000)
    statistic = (better - worse) ** 2 / max(1, better + worse)
    decided = not compared.gain_interval().low <= 0 <= compared.gain_interval().high
    if statistic > 4.6:
        assert decided
    elif statistic < 3.2:
        assert not decided


@given(COUNTS)
def test_accuracy_lies_within_its_interval(compared: Comparison) -> None:
    interval = compared.challenger_interval()
    assert 0 <= interval.low <= compared.challenger_accuracy + 1e-12
    assert compared.challenger_accuracy - 1e-12 <= interval.high <= 1


def test_intervals_have_the_known_values() -> None:
    """Wilson's interval of 81 in 263 is (0.2553, 0.3662); of no images it is everything."""
    interval = Comparison(81, 0, 0, 263 - 81).challenger_interval()
    assert (interval.low, interval.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (Comparison().challenger_interval().low, Comparison().challenger_interval().high) == (0.0, 1.0)


@given(COUNTS)
def test_counts_travel_as_metrics(compared: Comparison) -> None:
    assert read_metrics(as_metrics(compared, with_champion=True)) == (compared, True)
    alone = Comparison(0, compared.only_challenger, 0, compared.neither)
    assert read_metrics(as_metrics(alone, with_champion=False)) == (alone, False)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"correct": 3.0},
        {"challenger": 3.0},
        {"challenger": 3.0, "neither": 1.0, "both": 1.0},
        {"challenger": -1.0, "neither": 1.0},
        {"challenger": 0.5, "neither": 1.0},
        {"challenger": 2.0**31, "neither": 1.0},
        {"challenger": float("nan"), "neither": 1.0},
        {"challenger": float("inf"), "neither": 1.0},
    ],
)
def test_other_metrics_are_refused(metrics: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_metrics(metrics)
