"""How rounds follow each other: a cohort after the other, or devices as they become free."""

from collections.abc import Callable
from pkgutil import resolve_name

import pytest

from coordinator.config.modes import MODES
from coordinator.rounds.modes.buffered import Buffered
from coordinator.rounds.modes.synchronous import Synchronous
from coordinator.rounds.open_round import Missing
from fedvit.wire.messages import DeviceState
from tests.support.parts import Parts

MakeParts = Callable[..., Parts]


@pytest.mark.parametrize("mode", MODES)
def test_mode_of_a_run_is_that_of_its_configuration(make_parts: MakeParts, mode: str) -> None:
    parts = make_parts(mode=mode)
    assert type(parts.engine.mode) is resolve_name(MODES[mode].implementation)


def test_mode_is_synchronous_by_default(make_parts: MakeParts) -> None:
    assert isinstance(make_parts().engine.mode, Synchronous)


def test_synchronous_mode_assigns_tasks_of_the_open_round_again_and_lets_earlier_ones_go_on(parts: Parts) -> None:
    assert parts.engine.mode.continues_task(assigned_in=1, open_round=2)
    assert not parts.engine.mode.continues_task(assigned_in=2, open_round=2)


def test_synchronous_mode_does_not_evaluate_devices_at_work(parts: Parts) -> None:
    parts.arrive("pi", "nano")
    parts.open("pi")
    assert parts.engine.mode.busy() == ["pi"]


def test_buffered_mode_continues_every_task_and_evaluates_all(make_parts: MakeParts) -> None:
    parts = make_parts(mode="buffered")
    assert isinstance(parts.engine.mode, Buffered)
    parts.arrive("pi")
    parts.open("pi")
    assert parts.engine.mode.busy() == []
    assert all(parts.engine.mode.continues_task(assigned_in=number, open_round=2) for number in (1, 2))


def test_buffered_mode_asks_as_many_devices_as_may_work_at_once(make_parts: MakeParts) -> None:
    """One that is at work but offline does not count, nor one that failed in this round."""
    parts = make_parts(mode="buffered", concurrency=3)
    mode = parts.engine.mode
    assert isinstance(mode, Buffered)
    parts.arrive("a", "b", "c", "d", "e")
    opened = parts.open("a", "b")
    assert mode._vacancies(opened) == 1
    parts.state.presence.state_changed("a", DeviceState("a1", online=False))
    assert mode._vacancies(opened) == 2
    opened.failed |= dict.fromkeys("cd", Missing.FAILED)
    assert mode._vacancies(opened) == 1


def test_buffered_mode_is_full_with_as_many_results_as_its_buffer_holds(make_parts: MakeParts) -> None:
    parts = make_parts(mode="buffered", buffer=2)
    mode = parts.engine.mode
    assert isinstance(mode, Buffered)
    parts.arrive("a", "b", "c")
    opened = parts.open("a", "b", "c")
    for device, full in (("a", False), ("b", True)):
        opened.accept(device)
        assert mode._is_full(opened) is full


def test_buffered_mode_is_stuck_when_nobody_can_answer_any_more(make_parts: MakeParts) -> None:
    parts = make_parts(mode="buffered", rejoin_grace_s=0.0)
    mode = parts.engine.mode
    assert isinstance(mode, Buffered)
    parts.arrive("a", "b")
    opened = parts.open("a", "b")
    assert not mode._is_stuck(opened)
    opened.accept("a")
    assert not mode._is_stuck(opened), "b is at work"
    for device in "ab":
        parts.state.presence.state_changed(device, DeviceState(f"{device}1", online=False))
    mode._is_stuck(opened)
    assert mode._is_stuck(opened)


def test_mode_asks_devices_that_are_admitted_and_have_no_result_yet(make_parts: MakeParts) -> None:
    parts = make_parts(robust={"strikes": 1})
    parts.arrive(*"abcde")
    parts.state.presence.state_changed("b", DeviceState("b1", online=False))
    parts.state.counted.add("c")
    parts.strike("d", 1, "not finite")
    parts.state.number = 2
    assert parts.engine.mode.free() == ["a", "e"]


def test_synchronous_mode_waits_for_devices_that_may_return(make_parts: MakeParts) -> None:
    parts = make_parts(rejoin_grace_s=600.0)
    mode = parts.engine.mode
    assert isinstance(mode, Synchronous)
    parts.arrive("a", "b")
    assert mode._can_draw()
    parts.state.presence.state_changed("a", DeviceState("a1", online=False))
    assert not mode._can_draw()
    parts.arrive("a")
    assert mode._can_draw()


def test_devices_that_test_are_drawn_apart_from_those_that_train(make_parts: MakeParts) -> None:
    """Over twenty rounds the two cohorts are not always the same."""
    parts = make_parts(evaluation_cohort=0.4)
    mode, names, tested = parts.engine.mode, list("abcde"), list[list[str]]()
    parts.arrive(*names)
    parts.ports.trainer.plan = lambda devices: tested.append(list(devices)) or {}  # type: ignore[func-returns-value,method-assign]
    for number in range(1, 21):
        mode.evaluate(number)
    assert {len(cohort) for cohort in tested} == {2}
    assert sum(cohort != mode.draw(number, names, 2) for number, cohort in enumerate(tested, 1)) > 5
