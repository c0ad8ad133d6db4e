"""What states a task goes through, and when two tasks ask the same."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.compute.messages import PlannedTask
from coordinator.record.tables import TaskTimes
from coordinator.rounds.deadlines import Deadline
from coordinator.rounds.tasks import TRANSITIONS, DeviceTask, Tasks, TaskState, Work
from fedvit.wire.messages import Progress

PROGRAM: Any = None
"""Nothing here reads it."""
ENDS = [state for state, following in TRANSITIONS.items() if not following]


def task(
    device: str = "pi",
    number: int = 1,
    *,
    digest: str = "blake3:p",
    program: Any = PROGRAM,
    attempt: int = 1,
    **changed: Any,
) -> DeviceTask:
    planned = PlannedTask(program=digest, **{"groups": {"g": "blake3:g"}, **changed})
    work = Work(planned, program, attempt)
    return DeviceTask("r", device, number, "train", work, Deadline.fixed(time.monotonic(), 60.0))


def test_ends_are_final() -> None:
    assert {state.value for state in ENDS} == {
        "accepted", "declined", "failed", "late", "deadline", "offline", "crashed", "revoked", "cancelled",
    }  # fmt: skip
    for end in ENDS:
        made = task()
        made.state = end
        for following in TaskState:
            with pytest.raises(ValueError, match=f"the train task of pi in round 1 is {end}: it cannot be {following}"):
                made.to(following)


def test_states_lead_to_an_end_and_only_a_checked_result_is_accepted() -> None:
    before = [state for state, following in TRANSITIONS.items() if TaskState.ACCEPTED in following]
    assert before == [TaskState.CHECKED]
    reached = {TaskState.OFFERED}
    for _ in TaskState:
        reached |= set(itertools.chain.from_iterable(TRANSITIONS[state] for state in reached))
    assert reached == set(TaskState)
    assert all(set(ENDS) & following for following in TRANSITIONS.values() if following)


def test_task_notes_when_its_state_changes() -> None:
    """Once for each state of an attempt; another attempt begins anew."""
    made = task()
    for state in (TaskState.FETCHING, TaskState.WORKING):
        made.to(state)
    first = made.times
    made.to(TaskState.WORKING)
    assert made.times == first
    assert first.fetching_at
    assert first.fetching_at <= (first.working_at or "")
    assert first.arrived_at is None
    made.to(TaskState.UPLOADING)
    arrived = made.times.arrived_at
    made.to(TaskState.CHECKED)
    assert arrived
    assert made.times == first._replace(arrived_at=arrived)
    again = task()
    again.to(TaskState.WORKING)
    again.to(TaskState.OFFERED)
    assert again.times == TaskTimes()


def test_a_task_is_the_same_for_devices_of_which_the_same_is_asked() -> None:
    assert task("pi").id == task("nano").id
    others = [task(number=2), task(digest="blake3:q"), task(groups={"g": "blake3:h"}), task(lr_scale=0.5)]
    assert len({made.id for made in (task(), *others)}) == 5
    assert task(attempt=2).id == task().id


def test_a_message_about_another_task_of_the_round_is_not_about_this_one() -> None:
    made = task()
    known = Progress("r", 1, "train", 1, 2, task=made.id)
    assert made.concerns(known)
    assert made.is_same(known)
    assert made.is_same(Progress("r", 1, "train", 1, 2)), "software that names no tasks is believed"
    assert not made.is_same(Progress("r", 1, "train", 1, 2, task="another"))
    for other in (Progress("s", 1, "train", 1, 2), Progress("r", 2, "train", 1, 2), Progress("r", 1, "evaluate", 1, 2)):
        assert not made.concerns(other)


def test_receivers_of_a_blob_are_devices_at_work_on_a_task_that_was_sent() -> None:
    """An ended task's blobs can still be requested, but nobody is waited for."""
    program = SimpleNamespace(list_fetched_once=list)
    tasks, made = Tasks(), [task("pi", program=program), task("nano", program=program)]
    for one in made:
        tasks.add(one)
        tasks.offer(one)
    assert tasks.count_receivers("blake3:g") == 2
    tasks.end(made[0], TaskState.LATE)
    assert tasks.count_receivers("blake3:g") == 1
    assert tasks.may_read("pi", "blake3:g")
    again = task("pi", program=program)
    tasks.add(again)
    tasks.offer(again)
    assert tasks.count_receivers("blake3:g") == 2


def test_ended_tasks_are_no_longer_under_way() -> None:
    tasks, first, second = Tasks(), task(), task(number=2)
    tasks.add(first)
    tasks.add(second)
    tasks.end(first, TaskState.LATE)
    assert tasks.of("pi") is second, "the end of an old task takes no new one away"
    tasks.end(second, TaskState.DEADLINE)
    assert tasks.of("pi") is None
    assert (first.state, second.state) == (TaskState.LATE, TaskState.DEADLINE)
