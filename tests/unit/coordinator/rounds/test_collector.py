"""Results are stored before they are acknowledged, at most once each; and how tasks end without one."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from coordinator.rounds.collector import Strike
from coordinator.rounds.open_round import Missing
from coordinator.rounds.tasks import Task, TaskState
from fedvit.wire.messages import BlobNack, Cancel, Declined, Failed, ResultAck
from tests.support.parts import Parts
from tests.support.waiting import WAIT_S, wait_until


@pytest.fixture
def asked(parts: Parts) -> Parts:
    """Two devices at work in round 1, which needs both."""
    parts.arrive("pi", "nano")
    parts.open("pi", "nano")
    parts.sent.clear()
    return parts


def state_of(task: Task) -> TaskState:
    """Read anew: for a type checker an attribute does not change by calls."""
    return task.state


def test_collector_accepts_a_result_when_the_mirror_has_its_upload(asked: Parts) -> None:
    task, result, mirrored, answers = asked.task("pi"), asked.result(), list[str](), threading.Event()

    def mirror(digests: Iterable[str]) -> None:
        mirrored.extend(digests)
        assert answers.wait(WAIT_S)

    asked.state.mirror = mirror
    asked.collector.on_result("pi", result)
    wait_until(lambda: mirrored)
    asked.collector.commit(now=True)
    asked.collector.on_result("pi", result)  # again, as a device does that gets no answer
    assert state_of(task) is TaskState.UPLOADING
    assert asked.state.store.tasks.find_counted("r", 1) == set()
    answers.set()
    wait_until(lambda: asked.got("pi", ResultAck), meanwhile=lambda: asked.collector.commit(now=True))
    assert result.upload is not None
    assert mirrored == [result.upload.digest]
    assert asked.state.blobs.is_intact(result.upload.digest)
    assert asked.state.store.tasks.find_counted("r", 1) == {"pi"}


def test_collector_stores_a_result_before_it_acknowledges_it(asked: Parts) -> None:
    task, result = asked.task("pi"), asked.result()
    asked.collector.on_result("pi", result)
    assert state_of(task) is TaskState.CHECKED
    assert asked.got("pi", ResultAck) == [], "it waits for others"
    asked.collector.commit(now=True)
    assert asked.got("pi", ResultAck) == [ResultAck("r", 1, "train", accepted=True)]
    assert state_of(task) is TaskState.ACCEPTED
    assert result.upload is not None
    assert asked.state.blobs.is_intact(result.upload.digest)
    assert asked.state.store.tasks.find_counted("r", 1) == asked.state.counted == {"pi"}
    assert asked.collector.take_freed() == ["pi"]
    assert asked.collector.take_freed() == []


def test_collector_does_not_wait_once_the_round_is_complete(asked: Parts) -> None:
    for device in ("pi", "nano"):
        asked.collector.on_result(device, asked.result())
    asked.collector.commit()
    assert asked.state.counted == {"pi", "nano"}


def test_collector_acknowledges_a_repeated_result_and_counts_it_once(asked: Parts) -> None:
    for _ in range(3):
        asked.collector.on_result("pi", asked.result())
        asked.collector.commit(now=True)
    assert [ack.accepted for ack in asked.got("pi", ResultAck)] == [True] * 3
    assert len(asked.state.store.tasks.read_results("r")) == 1


@pytest.mark.parametrize(
    "changed",
    [{"metrics": {"loss": float("nan")}}, {"samples": 21}, {"upload": None, "inline": b""}],
    ids=["metrics", "samples", "upload"],
)
def test_collector_strikes_what_no_honest_device_sends(asked: Parts, changed: dict[str, Any]) -> None:
    asked.collector.on_result("pi", asked.result(**changed))
    [strike] = asked.collector.take_strikes()
    assert isinstance(strike, Strike)
    assert (strike.device, strike.round) == ("pi", 1)
    [ack] = asked.got("pi", ResultAck)
    assert (ack.accepted, ack.reason) == (False, strike.reason)
    assert asked.state.opened is not None
    assert asked.state.opened.failed == {"pi": Missing.FAILED}


def test_collector_strikes_an_upload_that_does_not_fit_the_program(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(1.0, 2.0, 3.0))
    [strike] = asked.collector.take_strikes()
    assert "result of pi for round 1" in strike.reason


def test_collector_refuses_an_upload_that_was_damaged_on_its_way_without_a_strike(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(inline=b"cut"))
    assert asked.collector.take_strikes() == []
    [ack] = asked.got("pi", ResultAck)
    assert not ack.accepted
    assert "the upload of 3 bytes has digest" in ack.reason


def test_collector_sends_a_task_again_that_has_changed_since(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(task="an earlier one"))
    assert asked.collector.take_to_resend() == [asked.task("pi")]
    assert asked.collector.take_strikes() == []
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


def test_collector_fetches_an_upload_and_asks_again_after_the_device_left(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(inline=b""))
    task = asked.task("pi")
    assert state_of(task) is TaskState.UPLOADING
    assert list(asked.collector.uploads()) == [task]
    asked.exchange.tick()
    assert len(asked.got("pi", BlobNack)) <= 1, "it is asked for once the link of blobs is there"
    asked.collector.device_left("pi")
    assert state_of(task) is TaskState.OFFERED
    assert list(asked.collector.uploads()) == []


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
    assert asked.collector.take_freed() == ["pi"]
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
