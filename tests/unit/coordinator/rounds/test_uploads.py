"""Uploads are fetched and checked; those that do not fit end their task."""

from coordinator.rounds.tasks import DeviceTask, TaskState
from fedvit.wire.messages import BlobNack, ResultAck
from tests.support.parts import Parts


def state_of(task: DeviceTask) -> TaskState:
    """Read anew: for a type checker an attribute does not change by calls."""
    return task.state


def test_uploads_strikes_an_upload_that_does_not_fit_the_program(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(1.0, 2.0, 3.0))
    [strike] = asked.ends.take_strikes()
    assert "result of pi for round 1" in strike.reason


def test_uploads_refuses_an_upload_that_was_damaged_on_its_way_without_a_strike(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(inline=b"cut"))
    assert asked.ends.take_strikes() == []
    [ack] = asked.got("pi", ResultAck)
    assert not ack.accepted
    assert "the upload of 3 bytes has digest" in ack.reason


def test_uploads_fetches_an_upload_and_asks_again_after_the_device_left(asked: Parts) -> None:
    asked.collector.on_result("pi", asked.result(inline=b""))
    task = asked.task("pi")
    assert state_of(task) is TaskState.UPLOADING
    assert list(asked.uploads.fetching()) == [task]
    asked.exchange.tick()
    assert len(asked.got("pi", BlobNack)) <= 1, "it is asked for once the link of blobs is there"
    asked.collector.device_left("pi")
    assert state_of(task) is TaskState.OFFERED
    assert list(asked.uploads.fetching()) == []
