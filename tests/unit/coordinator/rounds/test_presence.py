"""Who is alive."""

import time

import pytest

from coordinator.rounds.presence import LONGEST_BACKOFF_S, Presence
from fedvit.wire.messages import DeviceState
from tests.support.devices import hello


@pytest.fixture
def presence() -> Presence:
    """b and a are here."""
    known = Presence()
    known.arrived("b", hello("b1"))
    known.arrived("a", hello("a1"))
    return known


def test_device_is_online_after_its_hello(presence: Presence) -> None:
    assert presence.online() == ["a", "b"]
    assert presence.is_online("a")
    assert not presence.is_online("c")
    assert presence["a"].hello.instance == "a1"
    with pytest.raises(KeyError):
        presence["c"]


def test_classes_are_those_of_devices_that_are_online(presence: Presence) -> None:
    """Known without a look at all devices for each hello."""
    presence.arrived("c", hello("c1", classes=("bee", "cow")))
    assert set(presence.classes()) == {"ant", "bee", "cow"}
    presence.arrived("c", hello("c1", classes=("bee", "cow")))  # repeated
    assert presence.count_online() == 3
    assert presence.state_changed("c", DeviceState("c1", online=False))
    assert not presence.state_changed("c", DeviceState("c1", online=False))
    assert set(presence.classes()) == {"ant", "bee"}
    presence.dismiss("a")
    presence.all_offline()
    assert (set(presence.classes()), presence.count_online(), len(presence)) == (set(), 0, 3)


def test_will_or_farewell_makes_a_device_offline_until_its_hello(presence: Presence) -> None:
    assert presence.state_changed("a", DeviceState("a1", online=False))
    assert presence.online() == ["b"]
    assert presence["a"].hello.train_samples == 20, "what it said is still known"
    assert not presence.state_changed("a", DeviceState("a1", online=False)), "it is told once"
    presence.arrived("a", hello("a2"))
    assert presence.online() == ["a", "b"]


def test_the_late_will_of_an_earlier_process_changes_nothing(presence: Presence) -> None:
    presence.arrived("a", hello("a2"))
    assert not presence.state_changed("a", DeviceState("a1", online=False))
    assert presence.is_online("a")


def test_the_will_of_a_stranger_changes_nothing(presence: Presence) -> None:
    assert not presence.state_changed("c", DeviceState("c1", online=False))
    assert not presence.state_changed("c", DeviceState("c1", online=True))
    assert presence.online() == ["a", "b"]


def test_a_second_process_with_a_name_that_is_taken_is_a_rival(presence: Presence) -> None:
    rival = presence.find_rival("a", hello("other", host="elsewhere"))
    assert rival is not None
    assert "(on desk)" in rival.reason
    assert presence.find_rival("a", hello("a1")) is None, "the same process says hello again"
    assert presence.find_rival("c", hello("c1")) is None
    presence.state_changed("a", DeviceState("a1", online=False))
    assert presence.find_rival("a", hello("other")) is None, "the name is free again"


def test_all_devices_count_as_offline_when_our_own_link_breaks(presence: Presence) -> None:
    presence.all_offline()
    assert presence.online() == []
    assert presence.find_rival("a", hello("other")) is None
    presence.arrived("a", hello("a1"))
    assert presence.online() == ["a"]


def test_a_device_that_declined_rests_while_it_is_the_same_process(presence: Presence) -> None:
    presence["a"].backoff.begin("hot", 600.0)
    assert presence.online() == ["a", "b"]
    assert presence.available() == ["b"]
    assert [(device.name, device.backoff.reason) for device in presence.backing_off()] == [("a", "hot")]
    presence.arrived("a", hello("a1"))
    assert presence.available() == ["b"], "it only said hello again"
    presence.arrived("a", hello("a2"))
    assert presence.available() == ["a", "b"]


@pytest.mark.parametrize("forever", [float("nan"), float("inf"), 1e300])
def test_backoff_is_bounded(presence: Presence, forever: float) -> None:
    presence["a"].backoff.begin("busy", forever)
    assert presence.available() == ["b"]
    assert presence["a"].backoff.until <= time.monotonic() + LONGEST_BACKOFF_S


def test_a_rest_ends(presence: Presence) -> None:
    presence["a"].backoff.begin("busy", 0.0)
    assert presence.available() == ["a", "b"]
