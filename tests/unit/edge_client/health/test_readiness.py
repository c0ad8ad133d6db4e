"""Whether a device begins a task now."""

import datetime
from pathlib import Path

import pytest

from edge_client.health.readiness import BATTERY_AGAIN_S, BUSY_AGAIN_S, HOT_AGAIN_S, NotNow, Readiness
from edge_client.storage.pause import OwnerPause
from fedvit.policy import Hours, Policy, TrainPolicy
from profiles.probes.battery import Battery


def at(hour: int, minute: int = 0) -> datetime.datetime:
    return datetime.datetime(2026, 3, 1, hour, minute)


def test_without_limits_it_is_always_ready() -> None:
    assert Readiness(policy=Policy(), celsius=lambda: 120.0, battery=lambda: Battery(1, False)).not_now() is None


@pytest.mark.parametrize(("celsius", "ready"), [(64.9, True), (65.0, True), (65.5, False), (None, True)])
def test_heat(celsius: float | None, ready: bool) -> None:
    """A device without a sensor does not decline for what it cannot know."""
    not_now = Readiness(policy=Policy(train=TrainPolicy(max_temperature=65.0)), celsius=lambda: celsius).not_now()
    assert (not_now is None) == ready
    if not_now:
        assert not_now == NotNow("hot: 66 C, tasks start at or below 65 C", HOT_AGAIN_S)


@pytest.mark.parametrize(
    ("state", "ready"),
    [(Battery(29, False), False), (Battery(30, False), True), (Battery(5, True), True), (None, True)],
)
def test_battery(state: Battery | None, ready: bool) -> None:
    not_now = Readiness(policy=Policy(train=TrainPolicy(min_battery=30)), battery=lambda: state).not_now()
    assert (not_now is None) == ready
    if not_now:
        assert not_now == NotNow("low battery: 29 %, tasks start at 30 %", BATTERY_AGAIN_S)


def test_a_busy_file(tmp_path: Path) -> None:
    file = tmp_path / "busy"
    readiness = Readiness(policy=Policy(train=TrainPolicy(busy_file=file)))
    assert readiness.not_now() is None
    file.touch()
    assert readiness.not_now() == NotNow(f"busy: {file} exists", BUSY_AGAIN_S)


def test_a_pause_of_its_owner(tmp_path: Path) -> None:
    pause = OwnerPause(tmp_path)
    readiness = Readiness(policy=Policy(), pause=pause)
    assert readiness.not_now() is None
    pause.begin()
    assert readiness.not_now() == NotNow("paused by its owner", BUSY_AGAIN_S)


@pytest.mark.parametrize(
    ("hours", "now", "left_s"),
    [
        ("22:00-06:30", at(21, 59), 0.0),
        ("22:00-06:30", at(22), 8.5 * 3600),
        ("22:00-06:30", at(0), 6.5 * 3600),
        ("22:00-06:30", at(6, 29), 60.0),
        ("22:00-06:30", at(6, 30), 0.0),
        ("9:00-17:00", at(12), 5 * 3600),
        ("9:00-17:00", at(8), 0.0),
        ("9:00-17:00", at(17), 0.0),
    ],
)
def test_quiet_hours(hours: str, now: datetime.datetime, left_s: float) -> None:
    """They may go over midnight; asked again when they are over."""
    not_now = Readiness(policy=Policy(train=TrainPolicy(quiet_hours=Hours.parse(hours))), clock=lambda: now).not_now()
    assert (not_now.again_s if not_now else 0.0) == left_s


@pytest.mark.parametrize(("hour", "left_s"), [(21, 3600.0), (23, 0.0), (5, 0.0), (12, 36000.0)])
def test_device_trains_at_its_hours_only(hour: int, left_s: float) -> None:
    policy = Policy(train=TrainPolicy(hours=Hours.parse("22:00-06:00")))
    not_now = Readiness(policy=policy, clock=lambda: datetime.datetime(2026, 11, 26, hour)).not_now()
    assert (not_now.again_s if not_now else 0.0) == left_s
    assert not_now is None or not_now.reason == "it trains at 22:00-06:00"
