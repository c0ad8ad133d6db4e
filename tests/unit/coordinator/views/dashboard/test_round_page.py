"""The tasks of a round on one scale of time."""

from pathlib import Path

import pytest

from coordinator.record.tables import RoundRecord, TaskTimes
from coordinator.record.tasks import TaskHistory
from coordinator.views.dashboard.round_page import TaskBar, bars, read_details
from fedvit.errors import ConfigError
from fedvit.resources import ResourceUse
from tests.support.codes import has_code
from tests.support.records import RUN, begin_run


def at(seconds: float) -> str:
    return f"2026-11-22T12:00:{seconds:06.3f}+00:00"


def task(device: str, *, received_at: str | None = None, use: ResourceUse | None = None, **times: str) -> TaskHistory:
    outcome = "accepted" if received_at else "deadline" if "ended_at" in times else None
    used_in = 1 if received_at else None
    return TaskHistory(1, device, at(0), 1, outcome, None, received_at, used_in, use, TaskTimes(**times))


def pieces(bar: TaskBar) -> list[tuple[str, float, float]]:
    return [(piece.colour, round(piece.left, 3), round(piece.width, 3)) for piece in bar.pieces]


def test_bars_show_waiting_fetching_training_and_upload() -> None:
    """On a scale of 10 s: asked at once, fetching from 1 s on, 4 s of training until 8 s, accepted after 10 s."""
    times = {"fetching_at": at(1), "working_at": at(5), "arrived_at": at(8), "ended_at": at(10)}
    whole = task("whole", received_at=at(10), use=ResourceUse(train_s=4.0), **times)
    lost = task("lost", fetching_at=at(2), working_at=at(3), ended_at=at(9))
    older = task("older", received_at=at(5), use=ResourceUse(train_s=2.0))
    at_work = task("at work")
    record = RoundRecord("r", 1, ["whole", "lost", "older", "at work"], at(0))
    scale, made = bars(record, [whole, lost, older, at_work], {"at work": "working"})
    assert scale == 10.0
    assert [(bar.task.device, bar.state, bar.took_s) for bar in made] == [
        ("at work", "working", None), ("whole", "accepted", 10.0), ("lost", "deadline", 9.0),
        ("older", "accepted", 5.0),
    ]  # fmt: skip
    under_way, first, second, third = made
    assert pieces(first) == [("c7", 0.0, 10.0), ("c4", 10.0, 30.0), ("c0", 40.0, 40.0), ("c1", 80.0, 20.0)]
    assert (first.fetching_s, first.arrived_s) == (1.0, 8.0)
    assert pieces(second) == [("c7", 0.0, 20.0), ("c4", 20.0, 10.0), ("c0", 30.0, 60.0)], "training as it was reported"
    assert pieces(third) == [("c7", 0.0, 30.0), ("c0", 30.0, 20.0)], "of an older version"
    assert pieces(under_way) == [("c7", 0.0, 100.0)]


def test_bars_show_when_a_device_was_offline() -> None:
    """One was killed after 2 s, and came back after 5 s for another attempt; one never came back; one lost its link
    while it trained."""
    times = {"fetching_at": at(6), "working_at": at(7), "arrived_at": at(9), "ended_at": at(10)}
    back = task("back", received_at=at(10), left_at=at(2), returned_at=at(5), **times)
    gone = task("gone", fetching_at=at(0), working_at=at(1), left_at=at(2), ended_at=at(10))
    link = {"fetching_at": at(0), "working_at": at(1), "left_at": at(4), "returned_at": at(6), "arrived_at": at(10)}
    linked = task("linked", received_at=at(10), ended_at=at(10), **link)
    _, made = bars(RoundRecord("r", 1, ["back", "gone", "linked"], at(0)), [back, gone, linked], {})
    assert [pieces(bar) for bar in made] == [
        [("c7", 0.0, 20.0), ("c7", 50.0, 10.0), ("c4", 60.0, 10.0), ("c0", 70.0, 20.0), ("c1", 90.0, 10.0),
         ("c5", 20.0, 30.0)],
        [("c4", 0.0, 10.0), ("c0", 10.0, 10.0), ("c5", 20.0, 80.0)],
        [("c4", 0.0, 10.0), ("c0", 10.0, 30.0), ("c0", 60.0, 40.0), ("c5", 40.0, 20.0)],
    ]  # fmt: skip


@pytest.mark.parametrize("number", [-(2**70), -1, 0, 3, 2**70])
def test_round_that_a_run_does_not_have_is_named(tmp_path: Path, number: int) -> None:
    with begin_run(tmp_path) as store, pytest.raises(ConfigError, check=has_code("FV1806", str(number))):
        read_details(store, RUN, number)
