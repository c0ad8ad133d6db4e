"""Devices that join and leave a run: admitted, asked to wait, or refused, and what the record says of it."""

from collections.abc import Callable

import pytest

from coordinator.rounds import membership
from coordinator.rounds.membership import Arrival
from coordinator.rounds.open_round import Missing
from fedvit.policy import Needs
from fedvit.wire.messages import DeviceState, Manifest, Refused, Welcome
from tests.support.devices import hello
from tests.support.parts import Parts


def test_membership_admits_a_device_and_says_what_the_run_does(parts: Parts) -> None:
    parts.state.doing = "round 3/9: train"
    parts.membership.on_hello("pi", hello("i1"))
    assert parts.membership.take_arrivals() == [Arrival("pi", was_away=True)]
    assert parts.membership.take_arrivals() == []
    assert parts.got("pi", Welcome) == [Welcome("i1", 0, "round 3/9: train")]
    assert parts.state.presence.online() == ["pi"]
    assert [line for line in parts.lines if "pi joined: 20 training and 5 test images" in line]


def test_membership_admits_a_repeated_hello_without_another_line(parts: Parts) -> None:
    for _ in range(2):
        parts.membership.on_hello("pi", hello("i1"))
    assert [arrival.was_away for arrival in parts.membership.take_arrivals()] == [True, False]
    assert sum("joined" in line for line in parts.lines) == 1


def test_membership_refuses_a_second_process_of_a_name_while_the_first_is_online(parts: Parts) -> None:
    """Not for good: the first may leave. The operator reads of it once."""
    parts.arrive("pi")
    before = len(parts.lines)
    for _ in range(2):
        parts.membership.on_hello("pi", hello("other", host="vm\n"))
    refused, _ = parts.got("pi", Refused)
    assert (refused.instance, refused.final) == ("other", False)
    assert "online already (on desk); choose another with --id" in refused.reason
    assert parts.membership.take_arrivals() == []
    [line] = parts.lines[before:]
    assert "second device with id 'pi' (on 'vm\\n')" in line
    parts.membership.on_state("pi", DeviceState("pi1", online=False))
    parts.membership.on_hello("pi", hello("other"))
    assert parts.membership.take_arrivals() == [Arrival("pi", was_away=True)]


def test_membership_welcomes_a_device_that_the_run_does_not_ask_and_leaves_it_out(
    make_parts: Callable[..., Parts],
) -> None:
    parts = make_parts(devices_where="site=berlin")
    parts.membership.on_hello("far", hello("i1", labels={"site": "oslo"}))
    parts.membership.on_hello("near", hello("i2", labels={"site": "berlin"}))
    assert [arrival.device for arrival in parts.membership.take_arrivals()] == ["near"]
    [welcome] = parts.got("far", Welcome)
    assert welcome.waiting_for.startswith("run r: ")
    assert parts.refusals("far") == []


def test_membership_prints_a_final_refusal_once_and_records_each(parts: Parts) -> None:
    for _ in range(2):
        parts.membership.on_hello("pi", hello("i1", classes=("cat",)))
    assert [refused.final for refused in parts.got("pi", Refused)] == [True, True]
    assert len(parts.refusals("pi")) == 2
    assert sum("pi was refused" in line for line in parts.lines) == 1


def test_membership_counts_refusals_with_many_reasons_instead_of_printing_them(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device could print any number of lines otherwise."""
    for number in range(50):
        parts.membership.on_hello("pi", hello("i1", classes=(f"class-{number}",)))
    assert sum("pi was refused" in line for line in parts.lines) == 1
    parts.membership.on_hello("other", hello("i2", classes=("class-1",)))
    assert sum("other was refused" in line for line in parts.lines) == 1
    monkeypatch.setattr(membership, "REPORT_EVERY_S", 0.0)
    parts.membership.on_hello("pi", hello("i1", classes=("another",)))
    assert "49 times before" in parts.lines[-1]


def test_membership_sends_a_device_away_that_only_the_operator_can_release(make_parts: Callable[..., Parts]) -> None:
    """One in quarantine for some rounds stays, and reads why it is not asked."""
    for rounds, stays in ((None, False), (3, True)):
        parts = make_parts(robust={"strikes": 1, **({"quarantine_rounds": rounds} if rounds else {})})
        parts.arrive("pi")
        assert parts.quarantine.strike("pi", 1, "not finite")
        parts.membership.on_quarantined("pi")
        assert parts.state.presence.is_online("pi") is stays
        parts.sent.clear()
        parts.membership.on_hello("pi", hello("pi1"))
        assert bool(parts.got("pi", Welcome)) is stays
        assert bool(parts.got("pi", Refused)) is not stays
        told = [message.waiting_for for message in parts.got("pi", Welcome)]
        told += [message.reason for message in parts.got("pi", Refused)]
        assert all("not finite" in text for text in told)
        parts.state.store.runs.remove("r")


def test_membership_believes_the_last_will_of_the_process_that_is_here(parts: Parts) -> None:
    parts.arrive("pi")
    assert not parts.membership.on_state("pi", DeviceState("before", online=False))
    assert parts.state.presence.is_online("pi")
    assert parts.membership.on_state("pi", DeviceState("pi1", online=False))
    assert not parts.membership.on_state("pi", DeviceState("pi1", online=False))
    assert parts.lines[-1].endswith("pi left")


def test_membership_expels_a_device_from_the_open_round(parts: Parts) -> None:
    parts.arrive("pi", "nano")
    opened = parts.open("pi", "nano")
    parts.membership.expel("pi", "its certificate was revoked")
    assert opened.failed == {"pi": Missing.REVOKED}
    assert opened.waiting_for() == ["nano"]
    assert parts.state.presence.online() == ["nano"]
    assert parts.refusals("pi") == ["revoked: its certificate was revoked"]


def test_revoked_device_is_not_waited_for(parts: Parts) -> None:
    """Its task ends at once, with the reason; the others continue."""
    parts.arrive("pi", "nano")
    opened = parts.open("pi", "nano")
    for device in ("pi", "stranger"):
        parts.expel(device, "its certificate was revoked")
    assert opened.waiting_for() == ["nano"]
    assert [task.device for task in parts.state.tasks] == ["nano"]
    assert parts.refusals("pi") == ["revoked: its certificate was revoked"]
    assert parts.refusals("stranger") == [], "it never took part"
    ends = {task.device: task.outcome for task in parts.state.store.tasks.read_histories("r", [1])}
    assert ends == {"pi": "revoked", "nano": None}
    assert parts.ports.roster.admit(["nano", "pi"]) == ["nano"]
    parts.arrive("pi")  # with a new certificate
    assert parts.ports.roster.admit(["nano", "pi"]) == ["nano", "pi"]


def test_device_revoked_while_no_coordinator_ran_is_not_waited_for(parts: Parts) -> None:
    """An earlier process asked it: its task is in the record alone."""
    parts.ports.journal.add_tasks(1, {"pi": parts.work})
    parts.expel("pi", "its certificate was revoked")
    assert parts.refusals("pi") == ["revoked: its certificate was revoked"]
    assert parts.state.store.tasks.read_unanswered("r") == []


def test_membership_fetches_a_bounded_number_of_class_lists(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that announces ever more of them cannot fill the disk."""
    monkeypatch.setattr(membership, "MAX_CLASS_LISTS", 2)
    for number in range(3):
        described = Manifest("blake3:" + f"{number}" * 64, 5000, 126_976)
        parts.membership.on_hello("pi", hello("i1", classes=(), class_list=described))
        assert parts.membership.take_arrivals() == []
    [refused] = parts.got("pi", Refused)
    assert refused.final
    assert refused.reason == "it has sent 2 different lists of classes already"


def test_membership_does_not_ask_a_device_whose_policy_forbids_what_the_run_needs(
    make_parts: Callable[..., Parts],
) -> None:
    """It says so at once, once for each device, keeps it in the record, and admits the device when it allows it."""
    parts = make_parts(method="eftvit")
    assert parts.state.needs == Needs(updates=False, features=True, mask=0.75)
    strict = hello("i1", denies=("features", "class_counts", "\N{ESCAPE}[2J"))
    for _ in range(2):
        parts.membership.on_hello("pi", strict)
    assert parts.membership.take_arrivals() == []
    [welcome, _] = parts.got("pi", Welcome)
    assert welcome.waiting_for == "run r: the device's policy does not allow features"
    [line] = [line for line in parts.lines if "does not allow" in line]
    assert line.endswith("pi does not allow features, which eftvit needs; no device that is here allows it")
    assert parts.state.store.devices.read("r", "pi").denies == ("features", "class_counts")
    parts.membership.on_hello("pi", hello("i2", denies=("class_counts",)))
    assert [arrival.device for arrival in parts.membership.take_arrivals()] == ["pi"]
    parts.membership.use_needs(Needs(updates=True, features=False, mask=1.0))
    assert parts.state.presence.online() == ["pi"]
    parts.membership.use_needs(Needs(updates=False, features=True, mask=0.75))
    assert parts.state.presence.online() == ["pi"]
    parts.membership.on_hello("pi", strict)
    assert parts.state.presence.online() == []


def test_membership_of_a_service_leaves_such_a_device_to_other_runs(make_parts: Callable[..., Parts]) -> None:
    parts = make_parts(method="eftvit")
    parts.state.offers_refused = True
    parts.membership.on_hello("pi", hello("i1", denies=("features",)))
    [refused] = parts.got("pi", Refused)
    assert refused.final
