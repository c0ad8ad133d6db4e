"""Results are stored before they are acknowledged, at most once each."""

import threading
from collections.abc import Iterable

from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.wire.messages import ResultAck
from tests.support.parts import Parts
from tests.support.waiting import WAIT_S, wait_until


def state_of(task: DeviceTask) -> TaskState:
    """Read anew: for a type checker an attribute does not change by calls."""
    return task.state


def test_acceptance_accepts_a_result_when_the_mirror_has_its_upload(asked: Parts) -> None:
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


def test_acceptance_stores_a_result_before_it_acknowledges_it(asked: Parts) -> None:
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
    assert asked.ends.take_freed() == ["pi"]
    assert asked.ends.take_freed() == []


def test_acceptance_does_not_wait_once_the_round_is_complete(asked: Parts) -> None:
    for device in ("pi", "nano"):
        asked.collector.on_result(device, asked.result())
    asked.collector.commit()
    assert asked.state.counted == {"pi", "nano"}


def test_acceptance_acknowledges_a_repeated_result_and_counts_it_once(asked: Parts) -> None:
    for _ in range(3):
        asked.collector.on_result("pi", asked.result())
        asked.collector.commit(now=True)
    assert [ack.accepted for ack in asked.got("pi", ResultAck)] == [True] * 3
    assert len(asked.state.store.tasks.read_results("r")) == 1
