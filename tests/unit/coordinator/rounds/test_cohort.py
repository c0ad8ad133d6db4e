"""Who is asked."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.record.tables import Asked, ResultRecord
from coordinator.rounds.cohort import (
    BY_ANSWERS,
    cohort_size,
    find_utility,
    select_fair,
    select_oort,
    select_power_of_choice,
    select_uniform,
)
from fedvit.resources import ResourceUse

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


# --- by the devices' answers ----------------------------------------------------------------------------

NAMES_OF_20 = [f"pi-{number:02d}" for number in range(20)]


def answer(device: str, loss: float, number: int = 1, samples: int = 10, **use: float) -> ResultRecord:
    return ResultRecord("r", number, device, "train", samples, {"loss": loss}, ResourceUse(**use), None, number)


def rise() -> dict[str, ResultRecord]:
    """The loss rises with the device's number."""
    return {name: answer(name, 1.0 + number) for number, name in enumerate(NAMES_OF_20)}


@pytest.mark.parametrize("name", BY_ANSWERS)
@given(names=NAMES, wanted=COHORTS, seed=st.integers(0, 2**31 - 1), number=st.integers(1, 1000), data=st.data())
def test_any_answers_give_a_sorted_subset_independent_of_arrival(
    name: str, names: list[str], wanted: int, seed: int, number: int, data: st.DataObject
) -> None:
    """Whatever losses and times devices claim."""
    losses = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.none())
    answers = {}
    for device in data.draw(st.lists(st.sampled_from(names), unique=True)):
        loss, train_s = data.draw(losses), data.draw(st.one_of(st.none(), st.floats(0, 1e9)))
        use = ResourceUse(train_s=train_s, flops=data.draw(st.integers(0, 10**18)))
        metrics = {} if loss is None else {"loss": loss}
        answers[device] = ResultRecord("r", 1, device, "train", data.draw(st.integers(0, 10**6)), metrics, use, None, 1)
    chosen = BY_ANSWERS[name](names, wanted, seed, number, answers)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(names)
    assert len(chosen) == min(wanted, len(names))
    assert all(type(device) is str for device in chosen)
    assert BY_ANSWERS[name](reversed(names), wanted, seed, number, answers) == chosen


def test_power_of_choice_takes_the_highest_losses_of_random_candidates() -> None:
    for number in range(1, 30):
        candidates = select_uniform(NAMES_OF_20, 6, 4, number)
        assert select_power_of_choice(NAMES_OF_20, 3, 4, number, rise()) == candidates[-3:]
    new = {name: one for name, one in rise().items() if name != "pi-03"}
    asked = [number for number in range(1, 30) if "pi-03" in select_uniform(NAMES_OF_20, 6, 4, number)]
    assert asked
    for number in asked:
        assert "pi-03" in select_power_of_choice(NAMES_OF_20, 3, 4, number, new)


def test_utility_is_that_of_the_paper() -> None:
    """Images times loss, the bonus for age, and (T / t)^2 for what is slower than the median."""
    answers = [
        answer("a", 2.0, 4, samples=10, train_s=1.0),
        answer("b", 1.0, 1, samples=30, train_s=2.0),
        answer("c", 0.5, 9, samples=10, train_s=8.0),
    ]
    gain = np.array([20, 20, 5]) / 20  # the largest is cut to the next one: 95 % of the others lie below it
    want = (gain + np.sqrt(0.1 * np.log(10) / np.array([4, 1, 9]))) * np.array([1, 1, (2 / 8) ** 2])
    np.testing.assert_allclose(find_utility(answers, 10), want)
    work = [answer(name, 1.0, flops=flops) for name, flops in (("a", 100), ("b", 100), ("c", 400))]
    utility = find_utility(work, 1)
    np.testing.assert_allclose(utility[2] / utility[0], 1 / 16)


def test_one_claim_does_not_hide_the_losses_of_the_others() -> None:
    """Also of few devices; and an answer without a loss is an answer."""
    claims = {**rise(), "pi-00": answer("pi-00", 1e6)}
    np.testing.assert_allclose(
        find_utility(list(claims.values()), 1)[1:], find_utility(list(rise().values()), 1)[1:], rtol=0.06
    )
    silent = {**rise(), "pi-00": ResultRecord("r", 1, "pi-00", "train", 10, {}, ResourceUse(), None, 1)}
    chosen = [select(NAMES_OF_20, 3, 4, number, silent) for select in BY_ANSWERS.values() for number in range(1, 30)]
    assert not any("pi-00" in names for names in chosen)


def test_oort_asks_devices_with_high_losses_more_often_and_slow_ones_less() -> None:
    times = Counter(name for number in range(1, 301) for name in select_oort(NAMES_OF_20, 5, 4, number, rise()))
    assert sum(times[name] for name in NAMES_OF_20[15:]) > 0.6 * 1500
    slow = {name: answer(name, 1.0 + number, train_s=1.0) for number, name in enumerate(NAMES_OF_20)}
    slow["pi-19"] = answer("pi-19", 20.0, train_s=30.0)
    assert not any("pi-19" in select_oort(NAMES_OF_20, 5, 4, number, slow) for number in range(1, 50))


def test_oort_explores_less_as_the_run_goes_on() -> None:
    """10 of 20 devices have not answered: of 5 places 4 or 5 are theirs at first, and 1 in the end."""
    known = {name: one for name, one in rise().items() if name < "pi-10"}

    def count_explored(number: int) -> int:
        return sum(name not in known for name in select_oort(NAMES_OF_20, 5, 4, number, known))

    assert [count_explored(number) for number in (1, 30, 500)] == [4, 3, 1]
