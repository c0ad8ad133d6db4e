"""The round engine between its ports: no broker, no database, no devices."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from coordinator.compute.messages import NextState, PlannedTask
from coordinator.config import make_config
from coordinator.record.rounds import ClosedRound
from coordinator.record.tables import Asked, ResultRecord, RoundRecord, RoundTotals, SavedState, TaskRecord
from coordinator.rounds.engine import ATTEMPTS, RoundEngine
from coordinator.rounds.open_round import Missing, OpenRound
from coordinator.rounds.ports import Journal, Ports, Roster, RoundResult, RunHistory, Trainer
from coordinator.rounds.tasks import Work
from fedvit.errors import EmptyCohort, NoRoom
from fedvit.resources import ResourceUse
from tests.support.codes import has_code

PLANNED = PlannedTask(program="p", groups={})
PROGRAM: Any = None
"""Nothing here reads it."""


class Devices(Roster, Trainer):
    """Devices answer as soon as they are asked, except those in `failing`."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.failing: dict[str, Missing] = {}
        self.asked: list[tuple[int, str, list[str]]] = []
        self.log: list[str] = []

    def online(self) -> list[str]:
        return list(self.names)

    def admit(self, devices: Iterable[str]) -> list[str]:
        return list(devices)

    def begin(self, number: int, *, is_new: bool) -> None:
        self.log.append(f"{'begin' if is_new else 'resume'} {number}")

    def plan(self, devices: Iterable[str]) -> dict[str, Work]:
        return {device: Work(PLANNED, PROGRAM) for device in devices}

    def recall(self, tasks: Iterable[TaskRecord]) -> dict[str, Work]:
        return {task.device: Work(PLANNED, PROGRAM, task.attempt) for task in tasks}

    def offer(self, opened: OpenRound, devices: Iterable[str]) -> None:
        self.asked.append((opened.number, opened.kind, list(devices)))
        for device in self.asked[-1][2]:
            if device in self.failing:
                opened.fail(device, self.failing[device])
            else:
                opened.accept(device)

    def dismiss(self) -> None:
        self.log.append("dismiss")


class Memory(Journal, RunHistory):
    """`log` has what was kept, in order."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.left: dict[int, RoundRecord] = {}  # by an earlier process
        self.tasks: list[TaskRecord] = []
        self.damaged = 0
        self.closed: list[RoundResult] = []
        self.past: list[ClosedRound] = []
        self.accuracies: dict[int, float] = {}  # by round
        self.best: list[int] = []
        self.tested = False

    def first_round(self) -> int:
        return min(self.left, default=0)

    def open_round(self) -> int:
        return self.first_round()

    def find(self, number: int) -> RoundRecord | None:
        return self.left.get(number)

    def count_asked(self) -> Mapping[str, Asked]:
        return {}

    def newest_answers(self, number: int) -> Mapping[str, ResultRecord]:
        return {}

    def find_unanswered(self, number: int | None = None) -> list[TaskRecord]:
        return [task for task in self.tasks if number in (None, task.round)]

    def open(self, number: int, cohort: list[str], needed: int) -> None:
        self.log.append(f"open {number}: {','.join(cohort)} need {needed}")

    def add_tasks(self, number: int, work: Mapping[str, Work]) -> None:
        self.log.append(f"tasks {number}: {','.join(work)}")

    def results(self, opened: OpenRound) -> list[ResultRecord]:
        return [
            ResultRecord("r", opened.number, device, "train", 1, {}, ResourceUse(), None, opened.number)
            for device in sorted(opened.accepted)
        ]

    def drop_damaged(self, results: list[ResultRecord], repeats: int) -> bool:
        return repeats < self.damaged

    def devices_s(self, number: int) -> float:
        return 100.0

    def close(self, result: RoundResult) -> None:
        self.closed.append(result)
        self.log.append(f"close {result.number}")

    def prune(self, result: RoundResult) -> None:
        self.log.append(f"prune {result.number}")

    def read_past(self, first: int) -> list[ClosedRound]:
        return [past for past in self.past if past.round < first]

    def open_test(self) -> RoundRecord:
        self.log.append("open test")
        return RoundRecord("r", 7, [], opened_at="", closed_at="", evaluated=self.tested)

    def keep_evaluation(self, number: int) -> float | None:
        self.log.append(f"evaluated {number}")
        return self.accuracies.get(number)

    def keep_best(self, number: int) -> None:
        self.best.append(number)

    def finish(self, number: int, *, is_last: bool = False) -> None:
        self.log.append(f"finish {number}{' as the last' if is_last else ''}")

    def show_command(self) -> str:
        return "coordinator show r"


class World:
    """An engine, its ports, and what was told to the operator."""

    def __init__(self, *names: str, **values: Any) -> None:
        self.trainer = Devices(*names)
        self.journal = Memory(self.trainer.log)
        self.lines: list[str] = []
        config = make_config({"method": "fedavg", "rounds": 1, **values}, "test").run
        ports = Ports(self.trainer, self.trainer, self.journal, self.journal)
        self.engine = RoundEngine("r", config, ports, step=self.step, report=self.lines.append)

    def step(self, opened: OpenRound, results: list[ResultRecord]) -> NextState:
        if not results:
            raise EmptyCohort("FV0007", "nothing came")
        return NextState(saved=SavedState({}, None, {}), figures={"norm": 1.0}, damaged={}, needed=set())


def test_engine_keeps_a_round_before_it_asks_and_its_state_before_the_next_begins() -> None:
    world = World("a", "b", rounds=2, evaluate_every=2)
    world.engine.run()
    assert world.trainer.log == [
        "begin 1", "open 1: a,b need 2", "tasks 1: a,b", "close 1", "prune 1", "finish 1",
        "begin 2", "open 2: a,b need 2", "tasks 2: a,b", "close 2", "dismiss", "prune 2", "evaluated 2",
        "finish 2 as the last",
    ]  # fmt: skip
    assert world.trainer.asked == [(1, "train", ["a", "b"]), (2, "train", ["a", "b"]), (2, "evaluate", ["a", "b"])]
    figures = world.journal.closed[0].figures
    assert {name: figures[name] for name in ("norm", "cohort", "accepted", "declined", "late")} == {
        "norm": 1.0, "cohort": 2.0, "accepted": 2.0, "declined": 0.0, "late": 0.0,
    }  # fmt: skip


def test_engine_continues_an_open_round_with_its_cohort_and_attempts() -> None:
    world = World("a", "b", "c")
    world.journal.left[1] = RoundRecord("r", 1, ["a", "b"], opened_at="", needed=1)
    world.journal.tasks = [TaskRecord(1, "a", "p", {}, attempt=2)]
    world.engine.run()
    assert world.trainer.asked[0] == (1, "train", ["a", "b"])
    assert world.trainer.log[0] == "resume 1"
    assert world.journal.closed[0].figures["devices_s"] >= 100.0, "earlier processes waited for it, too"


def test_engine_asks_again_where_results_were_damaged_on_this_disk() -> None:
    world = World("a")
    world.journal.damaged = 2
    world.engine.run()
    assert len([kind for _, kind, _ in world.trainer.asked if kind == "train"]) == 3
    assert len(world.journal.closed) == 1


@pytest.mark.parametrize(("is_repeatable", "attempts"), [(True, ATTEMPTS), (False, 1)])
def test_engine_ends_after_attempts_without_a_result(is_repeatable: bool, attempts: int) -> None:
    world = World("a")
    world.trainer.is_repeatable = is_repeatable
    world.trainer.failing["a"] = Missing.FAILED
    with pytest.raises(EmptyCohort):
        world.engine.run()
    assert len(world.trainer.asked) == attempts
    assert world.journal.closed == []


@pytest.mark.parametrize("failing", [1, ATTEMPTS])
def test_engine_repeats_a_sum_that_fails_and_leaves_an_evaluation_out(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, left = World("a", "b", "c"), {"train": failing, "evaluate": ATTEMPTS}

    def add_up(opened: OpenRound) -> None:
        if left[opened.kind]:
            left[opened.kind] -= 1
            raise EmptyCohort("FV1521", "too few devices sent keys")

    monkeypatch.setattr(world.trainer, "add_up", add_up)
    if failing == ATTEMPTS:
        with pytest.raises(EmptyCohort, check=has_code("FV1501")):
            world.engine.run()
        assert world.journal.closed == []
    else:
        world.engine.run()
        assert "evaluated 1" in world.trainer.log
    said = sum("too few devices sent keys" in line for line in world.lines)
    assert said == (1 + ATTEMPTS if failing == 1 else ATTEMPTS)


def test_engine_counts_no_attempt_that_all_devices_declined() -> None:
    world = World("a")
    world.trainer.failing["a"] = Missing.DECLINED

    def agree(number: int, cohort: list[str], needed: int, keep: Callable[..., None] = world.journal.open) -> None:
        keep(number, cohort, needed)
        if len(world.trainer.asked) == ATTEMPTS + 1:
            world.trainer.failing.clear()

    world.journal.open = agree  # type: ignore[method-assign]
    world.engine.run()
    assert len(world.journal.closed) == 1
    assert world.lines == []


def test_engine_assigns_again_the_late_tasks_that_its_mode_continues() -> None:
    world = World("a", "b", late="discount", rounds=3)
    world.journal.left[3] = RoundRecord("r", 3, [], opened_at="", needed=1)
    world.journal.tasks = [TaskRecord(2, "a", "p", {}), TaskRecord(3, "b", "p", {})]
    world.engine.resume_tasks()
    assert world.trainer.asked == [(2, "train", ["a"])]


def test_engine_stops_and_keeps_the_best_round() -> None:
    world = World("a", rounds=9, stop={"patience": 2})
    world.journal.accuracies = {1: 0.5, 2: 0.7, 3: 0.7, 4: 0.6, 5: 0.9}
    world.engine.run()
    assert world.journal.best[-1] == 2
    assert [entry for entry in world.trainer.log if entry.startswith("finish")] == [
        "finish 1", "finish 2", "finish 3", "finish 4 as the last",
    ]  # fmt: skip
    assert world.trainer.log[-1] == "dismiss", "devices that still work in mode buffered are released"
    [line] = [line for line in world.lines if line.startswith("stopped")]
    assert "0.7 of round 2" in line
    assert "round 4" in line


def test_engine_stops_a_resumed_run_at_the_same_round() -> None:
    totals = [RoundTotals(cohort=1, accuracy_mean=accuracy) for accuracy in (0.7, 0.6, 0.5)]
    world = World("a", rounds=9, stop={"patience": 2})
    world.journal.past = [ClosedRound(1 + place, entry, {}) for place, entry in enumerate(totals[:2])]
    world.journal.left[3] = RoundRecord("r", 3, ["a"], "", "", evaluated=True, totals=totals[2])
    world.engine.run()
    assert world.trainer.asked == [], "the killed process had evaluated the last round"
    assert world.journal.best[-1] == 1


def test_engine_counts_each_round_once_in_a_run_that_was_paused() -> None:
    world = World("a", rounds=5, stop={"patience": 3, "seconds": 10.0})
    kept = [RoundTotals(cohort=1, accuracy_mean=accuracy) for accuracy in (0.7, 0.6, 0.5)]
    world.journal.past = [ClosedRound(1 + place, entry, {"devices_s": 3.0}) for place, entry in enumerate(kept[:2])]
    world.journal.left[3] = RoundRecord("r", 3, ["a"], "", "", evaluated=True, totals=kept[2])
    world.journal.accuracies = {4: 0.8, 5: 0.9}

    def run_out(number: int, cohort: list[str], needed: int) -> None:
        del world.journal.open  # type: ignore[method-assign]
        raise NoRoom("FV1302", "the disk is full")

    world.journal.open = run_out  # type: ignore[method-assign]
    with pytest.raises(NoRoom):
        world.engine.run()
    world.engine.run()
    assert [number for number, kind, _ in world.trainer.asked if kind == "train"] == [4, 5]


def test_engine_tests_the_last_round_of_a_run_that_stops_by_time() -> None:
    world = World("a", rounds=9, evaluate_every=5, stop={"seconds": 1e-9})
    world.engine.run()
    assert [(number, kind) for number, kind, _ in world.trainer.asked] == [(1, "train"), (1, "evaluate")]
    assert world.journal.best == [], "no rule needs the best round"


@pytest.mark.parametrize("tested", [False, True])
def test_engine_only_tests_an_earlier_run(tested: bool) -> None:
    world = World("a", "b", rounds=0, start_from="earlier")
    world.journal.tested = tested
    world.engine.run()
    assert world.trainer.asked == ([] if tested else [(7, "evaluate", ["a", "b"])])
    done = [] if tested else ["evaluated 7", "finish 7 as the last"]
    assert world.trainer.log == ["open test", "resume 7", *done]
