"""Tasks are sent to devices that are here, again to those that come back, and given up when nothing comes."""

import math
import time
from collections.abc import Callable

import msgspec
import pytest

from coordinator.rounds import scheduler
from coordinator.rounds.deadlines import Deadline
from coordinator.rounds.open_round import Missing
from coordinator.rounds.tasks import TaskState
from fedvit.wire.messages import BlobNack, DeviceState, Extended, Progress, Task, decode, encode
from tests.support.devices import hello
from tests.support.parts import Parts


def test_scheduler_sends_a_task_at_once_or_after_the_hello(parts: Parts) -> None:
    parts.arrive("pi")
    parts.open("pi", "away")
    [task] = parts.got("pi", Task)
    assert (task.instance, task.round, task.kind, task.attempt) == ("pi1", 1, "train", 1)
    assert task.task == parts.task("pi").id
    assert {blob.digest for blob in task.blobs} == set(parts.work.named())
    assert parts.got("away", Task) == []
    parts.arrive("away")
    assert parts.scheduler.on_arrival("away", was_away=True) is None
    assert [task.instance for task in parts.got("away", Task)] == ["away1"]


def test_scheduler_assigns_the_open_task_to_a_free_device_that_the_round_awaits(parts: Parts) -> None:
    parts.arrive("pi", "other")
    opened = parts.open("pi")
    for device in ("pi", "other"):
        parts.scheduler.assign_open(device)
    assert len(parts.got("pi", Task)) == 1, "it has its task already"
    assert parts.got("other", Task) == []
    opened.accept("pi")
    parts.state.tasks.end(parts.task("pi"), TaskState.CANCELLED)
    parts.scheduler.assign_open("pi")
    assert len(parts.got("pi", Task)) == 1


def test_scheduler_counts_attempts_of_a_device_whose_process_ends(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt is immediate, the third waits, then the task is given up."""
    monkeypatch.setattr(scheduler, "CHECK_INTERVAL_S", 0.0)
    parts.arrive("pi")
    parts.open("pi")
    for attempt, sent in ((2, True), (3, False)):
        parts.sent.clear()
        parts.state.presence.arrived("pi", hello(f"restarted-{attempt}"))
        assert parts.scheduler.on_arrival("pi", was_away=True) is None
        assert parts.task("pi").attempt == attempt
        assert [task.attempt for task in parts.got("pi", Task)] == ([attempt] if sent else [])
    parts.task("pi").offered_at = time.monotonic()
    parts.check_now("pi")
    assert parts.scheduler.overdue([], set()) == []
    assert [task.attempt for task in parts.got("pi", Task)] == [3], "the wait is over"
    [recorded] = parts.state.store.tasks.read_unanswered("r")
    assert recorded.attempt == 3
    parts.state.presence.arrived("pi", hello("restarted-4"))
    overdue = parts.scheduler.on_arrival("pi", was_away=True)
    assert overdue is not None
    assert (overdue.why, overdue.reason) == (Missing.CRASHED, "no result: its process ended 3 times at this task")


def test_scheduler_sends_the_same_attempt_again_to_a_process_that_lost_its_link(parts: Parts) -> None:
    parts.arrive("pi")
    parts.open("pi")
    parts.state.presence.state_changed("pi", DeviceState("pi1", online=False))
    parts.arrive("pi")
    parts.scheduler.on_arrival("pi", was_away=True)
    assert [task.attempt for task in parts.got("pi", Task)] == [1, 1]
    parts.task("pi").to(TaskState.UPLOADING)
    parts.scheduler.on_arrival("pi", was_away=True)
    assert len(parts.got("pi", Task)) == 2, "its upload is fetched already"


def test_scheduler_follows_a_task_by_the_requests_and_the_progress_of_its_device(parts: Parts) -> None:
    parts.arrive("pi")
    parts.open("pi")
    task = parts.task("pi")
    parts.scheduler.on_nack("pi", BlobNack(parts.work.planned.program, ((0, 1),)))
    assert task.state is TaskState.FETCHING
    parts.scheduler.on_progress("pi", Progress("r", 1, "train", 1, 10, 0.5, "another task"))
    assert task.state is TaskState.FETCHING
    parts.scheduler.on_progress("pi", Progress("r", 1, "train", 1, 10, 0.5, task.id))
    assert (task.state, task.progress and task.progress.done_steps) == (TaskState.WORKING, 1)


def test_scheduler_refuses_a_request_for_what_was_not_offered(parts: Parts) -> None:
    parts.arrive("pi")
    secret = parts.state.blobs.put(b"an upload of another device").digest
    parts.scheduler.on_nack("pi", BlobNack(secret, ((0, 1),)))
    [refusal] = parts.refusals("pi")
    assert refusal.startswith("blob: ")


def test_scheduler_gives_up_a_task_at_its_deadline(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those whose result is about to be stored."""
    monkeypatch.setattr(scheduler, "CHECK_INTERVAL_S", 0.0)
    parts.arrive("pi", "checked", "early")
    opened = parts.open("pi", "checked", "early")
    now = time.monotonic()
    for device in ("pi", "checked"):
        parts.task(device).deadline = Deadline.fixed(now - 10.0, 5.0)
        parts.check_now(device)
    parts.task("checked").to(TaskState.CHECKED)
    [overdue] = parts.scheduler.overdue([], set())
    assert (overdue.task.device, overdue.why, overdue.reason) == ("pi", Missing.DEADLINE, "no result: deadline")
    assert opened.failed == {"pi": Missing.DEADLINE}


def test_scheduler_tells_a_device_that_makes_progress_its_new_deadline(
    make_parts: Callable[..., Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CHECK_INTERVAL_S", 0.0)
    parts = make_parts(deadline_s="auto")
    parts.arrive("pi")
    parts.open("pi")
    task = parts.task("pi")
    task.deadline.announced = time.monotonic() + 1.0
    task.deadline.sign(time.monotonic())
    parts.check_now("pi")
    assert parts.scheduler.overdue([], set()) == []
    [extended] = parts.got("pi", Extended)
    assert extended.deadline_s > 1.0


def test_scheduler_gives_a_device_a_time_that_it_can_read(make_parts: Callable[..., Parts]) -> None:
    parts = make_parts(deadline_s=5.0, deadline_limit_s=math.inf, late="use")
    parts.arrive("pi")
    parts.open("pi")
    [task] = parts.got("pi", Task)
    assert isinstance(decode(encode(task)), Task)


def test_scheduler_asks_a_large_cohort_for_progress_less_often(parts: Parts) -> None:
    """10,000 devices together send a bounded number of messages per second."""
    parts.arrive("pi")
    opened = parts.open("pi")
    for others in (0, 1000, 100_000):
        opened.extend(map(str, range(others)))
        parts.scheduler.send_task(parts.task("pi"))
    intervals = [task.progress_s for task in parts.got("pi", Task)[1:]]
    assert intervals == [scheduler.PROGRESS_S, 1001 / scheduler.PROGRESS_PER_S, scheduler.LONGEST_PROGRESS_S]


def test_scheduler_gives_up_a_task_that_does_not_fit_into_a_message(parts: Parts) -> None:
    parts.arrive("pi")
    many = {f"group {number:0200}": parts.work.planned.groups["model"] for number in range(400)}
    parts.work = parts.work._replace(planned=msgspec.structs.replace(parts.work.planned, groups=many))

    def send(device: str, message: object) -> None:
        if len(msgspec.msgpack.encode(message)) > 64_000:
            parts.inbox.send(device, message)  # type: ignore[arg-type]  # the real one, which refuses it

    parts.state.send = send
    parts.open("pi")
    [overdue] = parts.scheduler.overdue([], set())
    assert overdue.why is Missing.FAILED
    assert overdue.reason.startswith("no result: its task cannot be sent: ")
