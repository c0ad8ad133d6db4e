"""The repository of tasks and results, and of results that count in a later round."""

import msgspec

from coordinator.record.record import Record
from coordinator.record.tables import Asked, ResultRecord, SavedState, TaskRecord, TaskTimes
from fedvit.resources import Budget, ResourceUse
from profiles.prediction import Expected, MemoryPhase, Prediction
from tests.support.records import DIGEST, add_result, make_result, reopen

EXPECTED = Expected(
    prediction=Prediction(
        device="a",
        source="measured",
        mode=None,
        step_s=0.1 + 0.2,  # all its digits come back
        train_s=12.5,
        evaluate_s=None,
        bound="memory",
        memory=[MemoryPhase(phase="train", parts={"software": 87_000_000, "weights": 5})],
        peak_rss_bytes=87_000_005,
        energy_j=None,
        power_w=None,
        over=("time", "upload"),
    ),
    flops=10**15,
    bytes_down=3,
    bytes_up=4,
    budget=Budget(memory_bytes=10**9, round_deadline_s=0.5),
    changes={"micro_batch": 4, "frozen_precision": "int8", "recompute": True, "threshold": 0.5},
    quality=0.49,
)


def make_task(number: int, device: str, expected: Expected | None) -> TaskRecord:
    return TaskRecord(number, device, DIGEST, {"head": DIGEST}, expected)


def test_results_come_back_sorted(store: Record) -> None:
    add_result(store, "b", make_result())
    add_result(store, "a", make_result(upload=None, use=ResourceUse()))
    add_result(store, "a", make_result(kind="evaluate", samples=5, metrics={"correct": 4.0}, upload=None))
    add_result(store, "c", make_result(2))
    again = reopen(store)
    first = make_result()
    assert [(entry.round, entry.device) for entry in again.tasks.read_results("r")] == [
        (1, "a"),
        (1, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert again.tasks.read_results("r", 1, "train")[1] == ResultRecord(
        "r", 1, "b", "train", 20, first.metrics, first.use, DIGEST, 1
    )
    assert again.tasks.read_results("r", 1, "train")[0].use == ResourceUse()
    assert again.tasks.read_results("r", 1, "train")[0].upload is None
    assert [entry.metrics for entry in again.tasks.read_results("r", 1, "evaluate")] == [{"correct": 4.0}]
    assert [entry.device for entry in again.tasks.read_results("r", 2)] == ["c"]
    assert [entry.device for entry in again.tasks.read_results("r", kind="train")] == ["a", "b", "c"]
    assert again.tasks.read_results("other") == []


def test_a_result_counts_once(store: Record) -> None:
    """By run, round, device and kind; the first one stands."""
    add_result(store, "a", make_result(samples=20))
    add_result(store, "a", make_result(samples=7, upload=None))
    [kept] = store.tasks.read_results("r")
    assert (kept.samples, kept.upload) == (20, DIGEST)
    add_result(store, "a", make_result(2))
    add_result(store, "a", make_result(kind="evaluate"))
    add_result(store, "b", make_result())
    assert len(store.tasks.read_results("r")) == 4


def test_what_was_expected_of_devices_comes_back(store: Record) -> None:
    """By round and device; the newest stands, and equal ones are kept once."""
    bare = msgspec.structs.replace(EXPECTED, budget=Budget(), changes={}, quality=1.0)
    store.tasks.add("r", [make_task(1, "a", None)])
    store.tasks.add("r", [make_task(1, "a", EXPECTED), make_task(1, "b", bare)])
    store.tasks.add("r", [make_task(2, "a", EXPECTED), make_task(2, "b", None)])
    assert reopen(store).tasks.read_expected("r") == {
        (1, "a"): EXPECTED,
        (1, "b"): bare,
        (2, "a"): EXPECTED,
    }
    with store.database._engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM expectations").scalar() == 2


def test_a_late_result_counts_in_the_round_it_was_taken_for(store: Record) -> None:
    """Made for round 1 by b, used in round 3; said again for another round it stays there."""
    add_result(store, "a", make_result(), 1)
    add_result(store, "b", make_result(), 3)
    add_result(store, "b", make_result(), 4)
    add_result(store, "c", make_result(3))
    add_result(store, "c", make_result(3, kind="evaluate", samples=5, metrics={"correct": 4.0}, upload=None), 3)
    again = reopen(store)
    found = [(entry.device, entry.round, entry.used_in) for entry in again.tasks.read_used_in("r", 3)]
    assert found == [("b", 1, 3), ("c", 3, 3)]
    assert (again.tasks.find_counted("r", 1), again.tasks.find_counted("r", 2), again.tasks.find_counted("r", 3)) == (
        {"a"},
        set(),
        {"b", "c"},
    )
    assert [entry.device for entry in again.tasks.read_used_in("r", 3, "evaluate")] == ["c"]


def test_times_of_tasks_are_kept_with_their_ends(store: Record) -> None:
    times = {name: TaskTimes(f"{name} fetches", f"{name} works", f"{name} arrives") for name in "ab"}
    store.tasks.add("r", [TaskRecord(1, name, DIGEST, {}) for name in "abc"])
    store.tasks.add_results([("a", make_result(1), None)], times)
    store.tasks.end("r", [(1, "b")], "offline", times)
    store.tasks.end("r", [(1, "b")], "late", {})
    a, b, c = (task.times for task in reopen(store).tasks.read_histories("r", [1]))
    assert (a._replace(ended_at=None), b._replace(ended_at=None)) == (times["a"], times["b"])
    assert a.ended_at
    assert b.ended_at
    assert c == TaskTimes()


def test_unanswered_tasks_come_back_and_an_outcome_stands(store: Record) -> None:
    first, second = TaskRecord(1, "a", DIGEST, {"g": DIGEST}), TaskRecord(2, "b", DIGEST, {})
    store.tasks.add("r", [second, first, TaskRecord(1, "b", DIGEST, {})])
    store.tasks.end("r", [(1, "b")], "accepted")
    store.tasks.end("r", [(1, "b")], "offline")
    again = reopen(store)
    assert again.tasks.read_unanswered("r") == [first, second]
    assert again.devices.read_asked("r") == {}, "no round is closed"
    for number in (1, 2):
        again.rounds.open("r", number, ["a", "b"])
        again.rounds.close("r", number, SavedState({}, None, {}), {})
        assert again.devices.read_asked("r") == {"a": Asked(1, 1), "b": Asked(number, number)}
    again.tasks.add("r", [TaskRecord(1, "b", DIGEST, {})])
    assert [task.device for task in again.tasks.read_unanswered("r")] == ["a", "b", "b"]


def test_newest_answers_are_those_that_earlier_steps_used(store: Record) -> None:
    """A late result counts when a step has used it; results for the open round do not count yet."""
    for number in (1, 2, 3):
        add_result(store, "a", make_result(number, metrics={"loss": float(number)}))
    add_result(store, "b", make_result(1, metrics={"loss": 7.0}), used_in=2)
    add_result(store, "c", make_result(3))
    add_result(store, "d", make_result(1, kind="evaluate"))
    found = reopen(store).tasks.read_newest_used("r", 3)
    assert {name: (one.round, one.metrics["loss"]) for name, one in found.items()} == {"a": (2, 2.0), "b": (1, 7.0)}
    assert {name: one.round for name, one in store.tasks.read_newest_used("r", 2).items()} == {"a": 1}
    assert store.tasks.read_newest_used("r", 1) == {}
