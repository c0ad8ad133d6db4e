"""Results that may count, and ends of tasks without one."""

from typing import Any

import pytest

from coordinator.rounds.open_round import Missing
from coordinator.rounds.task_ends import Strike
from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.wire.messages import Cancel, Declined, Failed, ResultAck
from tests.support.parts import Parts


def state_of(task: DeviceTask) -> TaskState:
    """Read anew: for a type checker an attribute does not change by calls."""
    return task.state


@pytest.mark.parametrize(
    "changed",
    [{"metrics": {"loss": float("nan")}}, {"samples": 21}, {"upload": None, "inline": b""}],
    ids=["metrics", "samples", "upload"],
)
def test_collector_strikes_what_no_honest_device_sends(asked: Parts, changed: dict[str, Any]) -> None:
    asked.collector.on_result("pi", asked.result(**changed))
    [strike] = asked.ends.take_strikes()
    assert isinstance(strike, Strike)
    assert (strike.device, strike.round) == ("pi", 1)
    [ack] = asked.got("pi", ResultAck)
    assert (ack.accepted, ack.reason) == (False, strike.reason)
    assert asked.state.opened is not None
    assert asked.state.opened.failed == {"pi": Missing.FAILED}


def test_collector_sends_a_task_again_that_has_changed_since(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(task="an earlier one"))
    assert asked.ends.take_to_resend() == [asked.task("pi")]
    assert asked.ends.take_strikes() == []
    assert state_of(asked.task("pi")) is TaskState.OFFERED


def test_collector_lets_a_device_keep_the_result_of_a_run_that_may_be_resumed(asked: Parts) -> None:
    asked.state.store.runs.create("over", {})
    asked.state.store.runs.update("over", status="finished")
    for run in ("elsewhere", "over"):
        asked.collector.on_result("pi", asked.result(run=run))
    assert [(ack.run, ack.keep) for ack in asked.got("pi", ResultAck)] == [("elsewhere", True), ("over", False)]


def test_collector_refuses_results_that_can_never_count(asked: Parts) -> None:
    """A round that was never asked, a device that was not asked, and one for which nobody waits any more."""
    asked.arrive("other")
    asked.collector.on_result("pi", asked.result(round=7))
    asked.collector.on_result("other", asked.result())
    asked.collector.give_up(asked.task("nano"), Missing.DEADLINE, "no result: deadline")
    asked.collector.on_result("nano", asked.result())
    assert [ack.reason for _, ack in asked.sent if isinstance(ack, ResultAck)] == [
        "round 7 was never asked",
        "other was not asked in round 1",
        "late: round 1 no longer waits for it",
    ]
    assert asked.state.counted == set()


def test_collector_gives_up_a_task_and_records_that_nothing_came(asked: Parts) -> None:
    task = asked.task("pi")
    asked.collector.give_up(task, Missing.DEADLINE, "no result: deadline")
    assert state_of(task) is TaskState.DEADLINE
    assert [(cancel.round, cancel.kind) for cancel in asked.got("pi", Cancel)] == [(1, "train")]
    assert [(entry.device, entry.lost) for entry in asked.state.store.devices.read_refusals("r")] == [("pi", True)]
    assert [task.device for task in asked.state.store.tasks.read_unanswered("r")] == ["nano"]


def test_collector_answers_a_device_that_declines_and_asks_it_later(asked: Parts) -> None:
    asked.collector.on_declined("pi", Declined("r", 1, "train", "too hot", 60.0))
    assert asked.got("pi", ResultAck) == [ResultAck("r", 1, "train", accepted=False)]
    assert asked.state.opened is not None
    assert asked.state.opened.failed == {"pi": Missing.DECLINED}
    assert asked.state.presence.available() == ["nano"]
    assert asked.refusals("pi") == ["declined: too hot; asked again in 60 s"]


def test_collector_answers_a_device_that_cannot_do_its_task(asked: Parts) -> None:
    asked.collector.on_failed("pi", Failed("r", 1, "train", "out of memory"))
    assert asked.got("pi", ResultAck) == [ResultAck("r", 1, "train", accepted=False)]
    assert "pi" not in asked.state.tasks
    assert asked.ends.take_freed() == ["pi"]
    assert any("pi cannot train in round 1: out of memory" in line for line in asked.lines)


def test_collector_that_pauses_leaves_the_record_as_it_is(asked: Parts) -> None:
    """So that the same tasks are assigned again."""
    asked.collector.on_result("pi", asked.result())
    asked.collector.pause()
    assert list(asked.state.tasks) == []
    assert asked.state.opened is None
    assert sorted(task.device for task in asked.state.store.tasks.read_unanswered("r")) == ["nano", "pi"]
    asked.collector.commit(now=True)
    assert asked.state.store.tasks.read_results("r") == []


def test_collector_counts_later_results_in_the_next_round_once_one_is_closed(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result())
    asked.collector.close_round()
    assert asked.state.opened is None
    assert asked.state.counts_in == 2
    assert [record.used_in for record in asked.state.store.tasks.read_results("r")] == [1]
