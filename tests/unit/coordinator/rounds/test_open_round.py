"""What a round that is being answered waits for, and when it closes."""

from coordinator.rounds.open_round import Missing, OpenRound, RoundPlan
from coordinator.rounds.presence import Presence
from fedvit.wire.messages import DeviceState
from tests.support.devices import hello, result


def test_open_round_closes_with_all_or_enough_results() -> None:
    opened = OpenRound(RoundPlan("run", 1, "train", ["b", "a", "c"], 3))
    assert opened.waiting_for() == ["b", "a", "c"]
    opened.accept("a")
    opened.fail("b", Missing.DECLINED)
    assert (opened.waiting_for(), opened.closes(), opened.declined()) == (["c"], False, {"b"})
    opened.fail("c", Missing.FAILED)
    assert opened.closes()
    assert (opened.accepted, opened.declined()) == ({"a"}, {"b"})
    opened = OpenRound(RoundPlan("run", 1, "train", ["a", "b", "c"], 2))
    opened.accept("c")
    assert not opened.closes()
    opened.accept("a")
    assert opened.closes()
    assert opened.waits_for("b")


def test_open_round_keeps_what_counted_when_a_device_fails_later() -> None:
    """And takes the result of a device that had failed, but not its failure a second time."""
    opened = OpenRound(RoundPlan("run", 1, "train", ["a", "b"], 2))
    opened.accept("a")
    opened.fail("a", Missing.OFFLINE)
    assert opened.failed == {}
    opened.fail("b", Missing.DEADLINE)
    opened.accept("b")
    assert (opened.accepted, opened.failed) == ({"a", "b"}, {})


def test_growing_round_does_not_await_devices_that_answered() -> None:
    opened = OpenRound(RoundPlan("run", 1, "train", ["a"], 3))
    opened.accept("a")
    opened.accept("late")  # of an earlier round
    opened.extend(["a", "late", "b"])
    assert opened.waiting_for() == ["b"]
    assert opened.cohort == {"a", "late", "b"}


def test_open_round_knows_its_own_messages() -> None:
    opened = OpenRound(RoundPlan("run", 2, "train", ["a"], 1))
    assert opened.asked(result(2))
    assert not opened.asked(result(1))
    assert not opened.asked(result(2, run="other"))
    assert not opened.asked(result(2, kind="evaluate"))


def test_open_round_is_given_up_when_all_that_is_missing_stays_away() -> None:
    presence = Presence()
    presence.arrived("a", hello("a1"))
    opened = OpenRound(RoundPlan("run", 1, "train", ["a"], 1))
    assert not opened.is_given_up(presence.is_online, grace_s=0.0)
    presence.state_changed("a", DeviceState("a1", online=False))
    assert not opened.is_given_up(presence.is_online, grace_s=600.0)
    assert opened.is_given_up(presence.is_online, grace_s=0.0)
    presence.arrived("a", hello("a2"))
    assert not opened.is_given_up(presence.is_online, grace_s=0.0)
