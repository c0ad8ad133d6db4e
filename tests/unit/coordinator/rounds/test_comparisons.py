"""The end of a run with rules of promotion: real coordinators, devices of the test."""

from typing import Any

import msgspec
import pytest

from fedvit.comparison import Comparison
from fedvit.wire.messages import Models, Result, Task
from tests.support.models import BETTER, WORSE
from tests.support.runs import Fake, Stage, honest

NEW: dict[str, Any] = {"models": 1, "test_samples": 100}
"""A device that knows models, with as many test images as the comparisons of the tests have."""


def list_wanted(stage: Stage) -> dict[str, str | None]:
    return {row.device: row.wanted for row in stage.store.models.read_devices()}


def test_run_ends_with_a_comparison_and_devices_use_its_model(stage: Stage) -> None:
    """An older device is told apart by its hello, and not asked."""
    a, b, old = stage.fake("a", **NEW), stage.fake("b", **NEW), stage.fake("old")
    stage.start(rounds=2, devices=3, promote={"after": 0})
    assert stage.finish() == "finished"
    assert [device.tasks("compare") for device in (a, b, old)] == [[2], [2], []]
    assert old.tasks("evaluate") == [1, 2]
    assert stage.accepted(2, "compare") == ["a", "b"]
    assert list_wanted(stage) == {"a": "champion", "b": "champion"}
    assert [message.states for message in a.got(Models)] == [{"r-2": "champion"}]
    rows = stage.store.models.read_devices("r-2")
    assert [(row.actual, row.comparison) for row in rows] == [("champion", Comparison(0, 90, 0, 10))] * 2
    assert "model r-2 becomes champion on 2 devices" in "\n".join(stage.lines)


def test_model_of_the_best_round_is_compared(stage: Stage) -> None:
    """Each round is as good as the first, which is the best then; the run stops after the second."""
    a = stage.fake("a", **NEW)
    stage.start(rounds=5, stop={"patience": 1}, promote={"after": 0})
    assert stage.finish() == "finished"
    assert (a.tasks(), a.tasks("compare")) == ([1, 2], [1])
    groups = {(task.kind, task.round): task.groups for task in a.got(Task)}
    assert groups["compare", 1] == groups["evaluate", 1] != groups["evaluate", 2]
    assert stage.store.models.read("r-1").stage == "champion"


def test_run_without_the_table_compares_nothing(stage: Stage) -> None:
    a = stage.fake("a", **NEW)
    stage.start()
    assert stage.finish() == "finished"
    assert (a.tasks("compare"), stage.store.models.read_all()) == ([], [])


@pytest.mark.parametrize(("compared", "stays"), [(BETTER, False), (WORSE, True)])
def test_next_run_replaces_the_champion_if_it_is_better(stage: Stage, compared: Comparison, stays: bool) -> None:
    a = stage.fake("a", **NEW)
    stage.start(promote={"after": 0})
    assert stage.finish() == "finished"
    stage.stop()
    a.compared, a.has_champion = compared, True
    stage.start(resume=True, rounds=2, promote={"after": 0})
    assert stage.finish() == "finished"
    assert a.models.report("").serving == ("r-1" if stays else "r-2")
    assert stage.store.models.read("r-2").stage == ("challenger" if stays else "champion")


def test_killed_coordinator_compares_what_is_left(stage: Stage) -> None:
    """One device had answered; the other is asked by the next process, and the model is judged once."""
    a, b = stage.fake("a", **NEW), stage.fake("b", **NEW)
    bring, b.bring = b.bring, lambda result: None if result.kind == "compare" else bring(result)  # type: ignore[method-assign]
    stage.start(devices=2, promote={"after": 0})
    stage.drive(lambda: stage.accepted(1, "compare") == ["a"] and bool(b.tasks("compare")))
    stage.stop()
    b.bring = bring  # type: ignore[method-assign]
    stage.start(resume=True, devices=2, promote={"after": 0})
    assert stage.finish() == "finished"
    assert (a.tasks("compare"), stage.accepted(1, "compare")) == ([1], ["a", "b"])
    assert [act.act for act in stage.store.models.read_promotions()] == ["compared", "promoted"]


def lie(**changes: Any) -> Any:
    def answer(device: Fake, result: Result) -> None:
        device.say(msgspec.structs.replace(result, **changes) if result.kind == "compare" else result)

    return answer


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 101},
        {"samples": 99},
        {"metrics": {"correct": 90.0}},
        {"metrics": {"challenger": 200.0, "neither": -100.0}},
    ],
)
def test_counts_that_cannot_be_are_refused(stage: Stage, changes: dict[str, Any]) -> None:
    honest_one, liar = stage.fake("honest", **NEW), stage.fake("liar", honest, **NEW)
    liar.bring = lambda result: lie(**changes)(liar, result)  # type: ignore[method-assign]
    stage.start(devices=2, promote={"after": 0})
    assert stage.finish() == "finished"
    assert list_wanted(stage) == {"honest": "champion"}
    assert any(reason.startswith("compare") for reason in stage.refusals("liar"))
    assert honest_one.models.report("").serving == "r-1"
