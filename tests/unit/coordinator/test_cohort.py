"""Who is asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cohort import select_cohort

NAMES = st.lists(st.text("abcd-0123", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)
COHORTS = st.one_of(st.floats(0.01, 1.0), st.integers(1, 40))


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
    assert len(select_cohort([f"pi-{number}" for number in range(devices)], cohort, 0, 1)) == asked


@given(NAMES, COHORTS, st.integers(0, 2**31 - 1), st.integers(1, 1000), st.randoms())
def test_a_cohort_is_a_sorted_subset_that_does_not_depend_on_who_came_first(
    names: list[str], cohort: float | int, seed: int, number: int, random: object
) -> None:
    chosen = select_cohort(names, cohort, seed, number)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(names)
    assert all(type(name) is str for name in chosen)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert select_cohort(names, cohort, seed, number) == chosen


def test_rounds_and_seeds_draw_anew_and_everybody_has_the_same_chance() -> None:
    """3 of 10 in 1000 rounds: each 300 times on average, standard deviation 14.5; 5 of them is 73."""
    names = [f"pi-{number}" for number in range(10)]
    cohorts = [tuple(select_cohort(names, 3, 1, number)) for number in range(1, 1001)]
    assert len(set(cohorts)) > 100  # of 120
    for name in names:
        assert abs(sum(name in cohort for cohort in cohorts) - 300) < 73
    assert cohorts != [tuple(select_cohort(names, 3, 2, number)) for number in range(1, 1001)]
