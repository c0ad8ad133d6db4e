"""Laws of selectors hold for fedvit's own, and refuse selectors that break them."""

from collections.abc import Collection, Mapping

import numpy as np
import pytest

from coordinator.record.tables import ResultRecord
from coordinator.rounds.cohort import BY_ANSWERS, Selector
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.selectors import LAWS, ask_the_same_again, choose_as_many_as_wanted, leave_answers_alone


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", BY_ANSWERS)
def test_fedvits_own_selectors_obey_the_laws(law: Law, name: str) -> None:
    assert find_break(law, name) is None


def select_anew(
    devices: Collection[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
) -> list[str]:
    return sorted(np.random.default_rng().permutation(sorted(devices))[:wanted].tolist())


def forget_answers(
    devices: Collection[str], wanted: int, seed: int, round_number: int, answers: dict[str, ResultRecord]
) -> list[str]:
    answers.clear()
    return sorted(devices)[:wanted]


def trust_losses(
    devices: Collection[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
) -> list[str]:
    weights = np.array([answers[name].metrics["loss"] for name in devices])
    return np.random.default_rng(seed).choice(sorted(devices), wanted, p=weights / weights.sum()).tolist()


@pytest.mark.parametrize(
    ("selector", "law", "reason"),
    [
        (select_anew, ask_the_same_again, "it chooses other devices"),
        (forget_answers, leave_answers_alone, "it changes the answers"),
        (trust_losses, choose_as_many_as_wanted, "KeyError"),
        (lambda *_: ["device-00"], choose_as_many_as_wanted, "where none is available"),
    ],
)
def test_a_broken_selector_is_found(selector: Selector, law: Law, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_ANSWERS, "oort", selector)
    found = find_break(law, "oort")
    assert found is not None
    assert reason in found
