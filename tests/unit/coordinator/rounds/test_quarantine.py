"""Strikes, and what they lead to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.config import RobustConfig
from coordinator.record.record import Record, open_record
from coordinator.rounds.quarantine import Quarantine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Record]:
    with open_record(tmp_path) as made:
        made.runs.create("r", {})
        yield made


def of(store: Record, *, limit: int = 2, rounds: int | None = None) -> Quarantine:
    return Quarantine("r", store, RobustConfig(strikes=limit, quarantine_rounds=rounds))


def test_the_last_of_the_strikes_puts_a_device_away(store: Record) -> None:
    quarantine = of(store)
    assert not quarantine.strike("pi", 1, "too long")
    assert quarantine.admitted(["nano", "pi"], 2) == ["nano", "pi"]
    assert quarantine.strike("pi", 2, "not finite")
    assert quarantine.admitted(["nano", "pi"], 2) == ["nano"]
    assert quarantine.why_not("pi", 3) == (
        "quarantine until it is released: 2 strikes, the last: not finite; "
        "the operator ends it with: coordinator quarantine r --release pi"
    )
    assert quarantine.why_not("nano", 3) is None


def test_a_restart_forgives_nothing(store: Record, tmp_path: Path) -> None:
    of(store).strike("pi", 1, "too long")
    with open_record(tmp_path) as again:
        quarantine = of(again)
        assert quarantine.strike("pi", 2, "too long")
        assert of(again).admitted(["pi"], 3) == []


def test_work_that_is_done_again_counts_once(store: Record) -> None:
    """After kill -9 the same round is closed once more, and finds the same outliers."""
    quarantine = of(store)
    assert [quarantine.strike("pi", 1, "too long") for _ in range(3)] == [False, False, False]
    assert len(store.strikes.read_all("r")) == 1


def test_quarantine_of_some_rounds_ends_automatically(store: Record) -> None:
    quarantine = of(store, limit=1, rounds=2)
    quarantine.strike("pi", 3, "too long")
    assert [quarantine.admitted(["pi"], number) for number in (3, 4, 5, 6)] == [[], [], [], ["pi"]]
    assert "until round 5 is over" in str(quarantine.why_not("pi", 4))


def test_after_a_quarantine_strikes_are_counted_anew(store: Record) -> None:
    quarantine = of(store, rounds=1)
    began = [quarantine.strike("pi", number, "too long") for number in (1, 2, 4, 5)]
    assert began == [False, True, False, True]


def test_a_release_is_heard_at_once(store: Record) -> None:
    quarantine = of(store, limit=1)
    quarantine.strike("pi", 1, "too long")
    assert store.strikes.release("r", "pi")
    assert quarantine.admitted(["pi"], 1) == ["pi"]
    assert not store.strikes.release("r", "pi"), "there is nothing more to release"


def test_a_release_forgets_strikes(store: Record) -> None:
    quarantine = of(store)
    quarantine.strike("pi", 1, "too long")
    assert store.strikes.release("r", "pi")
    assert not quarantine.strike("pi", 2, "too long")


def test_a_limit_of_0_counts_none(store: Record) -> None:
    quarantine = of(store, limit=0)
    assert not quarantine.strike("pi", 1, "too long")
    assert store.strikes.read_all("r") == []


def test_quarantines_that_hold_in_a_round_are_in_the_record(store: Record) -> None:
    """So the compute side leaves out what such a device had uploaded earlier."""
    quarantine = of(store, limit=1, rounds=2)
    assert store.strikes.read_current_quarantines("r", 2) == {}
    quarantine.strike("pi", 1, "too long")
    assert [[*store.strikes.read_current_quarantines("r", number)] for number in (1, 2, 3, 4)] == [
        ["pi"],
        ["pi"],
        ["pi"],
        [],
    ]
