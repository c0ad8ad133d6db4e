"""Laws of selectors of devices."""

from collections.abc import Iterator

import numpy as np

from coordinator.record.tables import ResultRecord
from coordinator.rounds.cohort import Selector, find_selector
from fedvit.resources import ResourceUse
from fleet.contracts.laws import Law, fail, require

NAMES = [f"device-{number:02d}" for number in range(12)]
WANTED = (1, 4, 12, 20)
ROUNDS = (1, 2, 30)


def choose_as_many_as_wanted(name: str) -> None:
    """It chooses as many different devices as are wanted, of those that are available."""
    select = _find(name)
    for answers in _make_answers():
        for wanted in WANTED:
            for number in ROUNDS:
                select(NAMES, wanted, 0, number, answers)  # `find_selector` checks it for packages
        require(select([], 3, 0, 1, answers) == [], "it chooses a device where none is available")


def ask_the_same_again(name: str) -> None:
    """The same seed, round and answers give the same devices, in any order, also after other rounds: a run resumes."""
    select = _find(name)
    for answers in _make_answers():
        first = [select(NAMES, 4, seed, number, answers) for seed in (0, 1) for number in ROUNDS]
        turned = dict(reversed(answers.items()))
        again = [select(NAMES[::-1], 4, seed, number, turned) for seed in (1, 0) for number in reversed(ROUNDS)]
        require(first == again[::-1], "called again, in another order, it chooses other devices")


def leave_answers_alone(name: str) -> None:
    """It does not change devices and answers that it is given."""
    select = _find(name)
    for answers in _make_answers():
        names, before = list(NAMES), dict(answers)
        select(names, 4, 0, 3, answers)
        require(names == NAMES, "it changes the list of devices")
        require(answers == before, "it changes the answers")


LAWS: tuple[Law, ...] = (choose_as_many_as_wanted, ask_the_same_again, leave_answers_alone)


def _find(name: str) -> Selector:
    return find_selector(name) or fail("it reads no answers")


def _make_answers() -> Iterator[dict[str, ResultRecord]]:
    """None yet, those of some devices, and whatever devices may claim."""
    yield {}
    rng = np.random.default_rng(0)
    losses, seconds = rng.exponential(size=(2, len(NAMES))).tolist()
    yield {
        name: _answer(name, {"loss": loss}, 10, ResourceUse(train_s=train_s, flops=10**9))
        for name, loss, train_s in list(zip(NAMES, losses, seconds, strict=True))[:8]
    }
    claims: list[dict[str, float]] = [{}, {"loss": 0.0}, {"loss": 1e300}, {"loss": -1e300}]
    yield {
        name: _answer(name, claims[place % 4], 10**6 * (place % 3), ResourceUse(flops=place % 2 * 10**18))
        for place, name in enumerate(NAMES)
    }


def _answer(device: str, metrics: dict[str, float], samples: int, use: ResourceUse) -> ResultRecord:
    return ResultRecord("run", 2, device, "train", samples, metrics, use, None, 2)
