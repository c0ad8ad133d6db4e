"""Who is asked."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.record.tables import Asked
from coordinator.rounds.cohort import cohort_size, select_fair, select_uniform

NAMES = st.lists(st.text("abcd-0123", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)
COHORTS = st.integers(1, 40)


@pytest.mark.parametrize(
    ("cohort", "devices", "asked"),
    [
        (1.0, 7, 7),
        (0.5, 7, 4),  # 3.5: Python rounds halves to even
        (0.5, 5, 2),  # 2.5
        (0.3, 10, 3),
        (0.01, 10, 1),
        (3, 10, 3),
        (1, 10, 1),
        (10, 4, 4),
    ],
)
def test_how_many_are_asked(cohort: float | int, devices: int, asked: int) -> None:
    """A share is rounded and at least one; a number is at most all."""
    assert cohort_size(cohort, devices) == asked


@given(NAMES, COHORTS, st.integers(0, 2**31 - 1), st.integers(1, 1000), st.randoms())
def test_cohort_is_a_sorted_subset_independent_of_arrival(
    names: list[str], cohort: int, seed: int, number: int, random: object
) -> None:
    chosen = select_uniform(names, cohort, seed, number)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(names)
    assert all(type(name) is str for name in chosen)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert select_uniform(names, cohort, seed, number) == chosen


def test_rounds_and_seeds_draw_anew_and_everybody_has_the_same_chance() -> None:
    """3 of 10 in 1000 rounds: each 300 times on average, standard deviation 14.5; 5 of them is 73."""
    names = [f"pi-{number}" for number in range(10)]
    cohorts = [tuple(select_uniform(names, 3, 1, number)) for number in range(1, 1001)]
    assert len(set(cohorts)) > 100  # of 120
    for name in names:
        assert abs(sum(name in cohort for cohort in cohorts) - 300) < 73
    assert cohorts != [tuple(select_uniform(names, 3, 2, number)) for number in range(1, 1001)]


def test_fair_turns_go_round() -> None:
    """7 devices, 3 a round: nobody ever waits longer than three rounds; one that comes in round 50 is asked at once."""
    names, wanted, rounds = 7, 3, 70
    before: dict[str, Asked] = {}
    history: list[list[str]] = []
    for number in range(1, rounds + 1):
        devices = [f"pi-{index}" for index in range(names)] + (["new"] if number >= 50 else [])
        chosen = select_fair(reversed(devices), wanted, 5, number, before)
        assert chosen == select_fair(devices, wanted, 5, number, before)
        assert chosen == sorted(set(chosen))
        assert len(chosen) == wanted
        history.append(chosen)
        for name in chosen:
            before[name] = Asked(number, before.get(name, Asked(0, 0)).times + 1)
    for index in range(names):
        turns = [number for number, chosen in enumerate(history) if f"pi-{index}" in chosen]
        assert max(later - turn for turn, later in pairwise(turns)) <= 3
    assert "new" in history[49]


def test_ties_are_broken_by_seed_and_round() -> None:
    names = [f"pi-{index}" for index in range(8)]
    firsts = {tuple(select_fair(names, 2, seed, 1, {})) for seed in range(20)}
    assert len(firsts) > 5
