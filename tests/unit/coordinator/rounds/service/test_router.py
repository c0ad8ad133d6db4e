"""The router over the memory transport: runs are what the test makes of their transports, devices what it says."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from coordinator.record.leadership import Leadership
from coordinator.record.record import Record, open_record
from coordinator.rounds.service.assignment import NO_WORK
from coordinator.rounds.service.router import Router, RunTransport
from fedvit.errors import LeadershipLost
from fedvit.resources import ResourceUse
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.transport.memory import MemoryBroker, MemoryTransport
from fedvit.wire.messages import (
    CoordinatorState,
    Declined,
    DeviceState,
    ModelReport,
    Models,
    Refused,
    Result,
    ResultAck,
    RunEnded,
    Welcome,
    decode,
    encode,
    leading_epoch,
    term_of,
)
from fedvit.wire.topics import Topics
from tests.support.codes import has_code
from tests.support.devices import SpeakingDevice, drained, hello
from tests.support.models import FIRST, compare_on
from tests.support.postgresql import Postgresql
from tests.support.waiting import wait_until

TOPICS = Topics("home")


class Device(SpeakingDevice):
    """One device at the hall's broker."""

    def __init__(self, hall: "Hall", name: str, instance: str = "i1", **labels: str) -> None:
        super().__init__(hall.broker, name, hello(instance, labels=labels))
        self.hall = hall
        self.connect()

    def say_raw(self, raw: bytes) -> None:
        super().say_raw(raw)
        self.hall.settle()


class Hall:
    """A broker, a router, and runs that only listen."""

    def __init__(self, leadership: Leadership | None = None, store: Record | None = None) -> None:
        self.broker = MemoryBroker()
        self.said: list[str] = []
        self.ended: set[str] = set()
        link = MemoryTransport(SimpleQueue(), self.broker, "coordinator")
        self.router = Router(
            link,
            "home",
            has_ended=lambda run: run in self.ended,
            operator_log=self.said.append,
            leadership=leadership,
            store=store,
        )
        self.router.open()
        self.settle()

    def run(self, name: str, devices_where: str = "") -> RunTransport:
        transport = RunTransport(self.router, name, devices_where)
        transport.open()
        self.settle()
        return transport

    def settle(self) -> None:
        while not self.router.events.empty():
            self.router.pump(0.0)

    def belongs(self) -> dict[str, str | None]:
        return {member.device: member.run for member in self.router.members()}


@pytest.fixture
def hall() -> Hall:
    return Hall()


def messages(transport: RunTransport) -> list[tuple[str, Any]]:
    """What a run heard from devices since this was asked last: (device, message)."""
    events = [event for event in drained(transport.inbox) if isinstance(event, Received)]
    return [(TOPICS.device_of(event.topic), decode(event.payload)) for event in events]


def refuse(transport: RunTransport, device: Device, reason: str, *, final: bool) -> None:
    refused = Refused(device.hello.instance, reason, final=final)
    transport.publish(TOPICS.to_device(device.name), encode(refused))


def test_router_without_runs_welcomes_a_device(hall: Hall) -> None:
    device = Device(hall, "pi-1")
    device.say(device.hello)
    assert device.messages() == [Welcome("i1", hall.router.epoch, NO_WORK)]
    assert hall.belongs() == {"pi-1": None}


def test_devices_get_the_states_of_their_models_after_each_welcome(tmp_path: Path) -> None:
    """A device without a run by the router, another by its run; their reports go to no run."""
    store = open_record(tmp_path)
    compare_on(store, "r-1", {"pi-1": FIRST, "pi-2": FIRST}, after=0)
    hall = Hall(store=store)
    run = hall.run("r", "site=berlin")
    idle, busy = Device(hall, "pi-1"), Device(hall, "pi-2", site="berlin")
    states = Models("i1", hall.router.epoch, {"r-1": "champion"})
    idle.say(idle.hello)
    assert [type(message) for message in idle.messages()] == [Welcome, Models]
    busy.say(busy.hello)
    assert busy.messages() == [], "its run welcomes it"
    run.publish(TOPICS.to_device("pi-2"), encode(Welcome("i1", hall.router.epoch, "round 1")))
    hall.settle()
    assert busy.messages()[1:] == [states]
    for device in (idle, busy):
        device.say(ModelReport("i1", {"r-1": "champion"}, "r-1"))
    assert [row.actual for row in store.models.read_devices()] == ["champion", "champion"]
    assert [message for _, message in messages(run) if isinstance(message, ModelReport)] == []
    store.close()


def test_router_gives_a_device_that_waits_to_a_run_that_begins(hall: Hall) -> None:
    """By its last hello; the run's epoch is that of all runs, so that the device need not join again."""
    device = Device(hall, "pi-1")
    device.say(device.hello)
    run = hall.run("a")
    assert drained(run.inbox)[0] == Connected()
    assert run.shared_epoch == hall.router.epoch
    device.say(Declined("a", 1, "train", "hot", 9.0))
    assert [message for _, message in messages(run)] == [Declined("a", 1, "train", "hot", 9.0)]
    assert hall.belongs() == {"pi-1": "a"}


def test_router_gives_each_device_to_the_first_run_whose_labels_it_has(hall: Hall) -> None:
    berlin, munich, rest = hall.run("b", "site=berlin"), hall.run("m", "site=munich,board=rpi5"), hall.run("r")
    devices = [
        Device(hall, "d-1", site="berlin"),
        Device(hall, "d-2", site="munich", board="rpi5"),
        Device(hall, "d-3", site="munich", board="rpi4"),
    ]
    for device in devices:
        device.say(device.hello)
        device.say(Declined("x", 1, "train", device.name, 9.0))
    assert hall.belongs() == {"d-1": "b", "d-2": "m", "d-3": "r"}
    for run, device in zip((berlin, munich, rest), devices, strict=True):
        assert messages(run) == [
            (device.name, device.hello),
            (device.name, Declined("x", 1, "train", device.name, 9.0)),
        ]


def test_router_gives_a_device_to_another_run_when_the_operator_changes_its_labels(hall: Hall) -> None:
    """A label of the operator replaces that of the device; without it, the device's own is used again."""
    berlin, munich = hall.run("b", "site=berlin"), hall.run("m", "site=munich")
    device = Device(hall, "d-1", site="berlin")
    device.say(device.hello)
    assert hall.belongs() == {"d-1": "b"}
    messages(berlin)
    hall.router.set_labels({"d-1": {"site": "munich"}})
    assert hall.belongs() == {"d-1": "m"}
    assert [type(message) for _, message in messages(berlin)] == [DeviceState]
    assert messages(munich) == [("d-1", device.hello)]
    assert hall.router.members()[0].labels == {"site": "munich"}
    hall.router.set_labels({})
    assert hall.belongs() == {"d-1": "b"}


def test_router_reports_why_no_run_selects_a_device(hall: Hall) -> None:
    hall.run("b", "site=berlin")
    device = Device(hall, "d-1", site="munich")
    device.say(device.hello)
    [welcome] = device.messages()
    assert welcome.waiting_for == "run b: it is for devices with site=berlin, and this one has site=munich"


def test_router_gives_devices_of_a_run_that_ends_to_the_next(hall: Hall) -> None:
    """What the first run says at its end reaches them, and the router's state topic is the router's alone."""
    first, second = hall.run("a"), hall.run("b")
    device = Device(hall, "pi-1")
    device.say(device.hello)
    assert messages(second) == []
    device.messages()
    first.publish(TOPICS.to_device("pi-1"), encode(RunEnded("a", "finished")))
    first.publish(TOPICS.coordinator_state, encode(CoordinatorState(0, alive=False)))
    first.close()
    hall.settle()
    assert device.messages() == [RunEnded("a", "finished")]
    assert messages(second) == [("pi-1", device.hello)]
    second.close()
    hall.settle()
    assert device.messages() == [Welcome("i1", hall.router.epoch, NO_WORK)]


def test_router_offers_a_device_that_one_run_refuses_to_others(hall: Hall) -> None:
    """A refusal that is final for one run is not for the service. One that is not final reaches the device."""
    first, second = hall.run("a"), hall.run("b")
    device = Device(hall, "pi-1")
    device.say(device.hello)
    refuse(first, device, "a twin", final=False)
    assert device.messages() == [Refused("i1", "a twin", final=False)]
    refuse(first, device, "other classes", final=True)
    hall.settle()
    assert messages(second) == [("pi-1", device.hello)]
    refuse(second, device, "too small", final=True)
    hall.settle()
    assert device.messages() == [Welcome("i1", hall.router.epoch, "run a: other classes; run b: too small")]


def test_router_passes_a_last_will_on_and_forgets_nothing(hall: Hall) -> None:
    run = hall.run("a")
    device = Device(hall, "pi-1")
    device.say(device.hello)
    messages(run)
    device.transport.vanish()
    hall.settle()
    assert messages(run) == [("pi-1", DeviceState("i1", online=False))]
    assert [(member.online, member.run) for member in hall.router.members()] == [(False, "a")]
    run.close()
    other = hall.run("b")
    assert messages(other) == [], "it is not there"
    back = Device(hall, "pi-1", instance="i2")
    back.say(back.hello)
    assert messages(other) == [("pi-1", back.hello)]


def test_router_reassigns_device_whose_labels_changed(hall: Hall) -> None:
    berlin, munich = hall.run("b", "site=berlin"), hall.run("m", "site=munich")
    device = Device(hall, "pi-1", site="berlin")
    device.say(device.hello)
    messages(berlin)
    device.transport.vanish()
    updated = Device(hall, "pi-1", instance="i2", site="munich")
    updated.say(updated.hello)
    assert messages(berlin)[-1][1].online is False
    assert messages(munich) == [("pi-1", updated.hello)]


def test_router_refuses_a_second_device_of_the_same_name(hall: Hall) -> None:
    device = Device(hall, "pi-1")
    device.say(device.hello)
    twin = Device(hall, "pi-1", instance="i2")
    for _ in range(2):
        twin.say(twin.hello)
    assert [line for line in hall.said if "second device with id 'pi-1'" in line] == hall.said[-1:]
    refused = twin.messages()[-1]
    assert isinstance(refused, Refused)
    assert not refused.final
    assert "online already (on desk)" in refused.reason


@pytest.mark.parametrize(("ended", "keep"), [(False, True), (True, False)])
def test_router_answers_results_of_other_runs(hall: Hall, ended: bool, keep: bool) -> None:
    hall.ended = {"old"} if ended else set()
    device = Device(hall, "pi-1")
    device.say(device.hello)
    device.say(Result("old", 3, "train", 5, {}, ResourceUse()))
    ack = device.messages()[-1]
    assert isinstance(ack, ResultAck)
    assert (ack.run, ack.round, ack.accepted, ack.keep) == ("old", 3, False, keep)


def test_router_answers_a_hello_that_cannot_be_read(hall: Hall) -> None:
    device = Device(hall, "pi-1")
    device.transport.publish(TOPICS.from_device("pi-1"), b"\x63" + encode(device.hello)[1:])
    hall.settle()
    [refused] = device.messages()
    assert refused.final
    assert "wire version 99" in refused.reason


def test_router_whose_link_breaks_takes_devices_back_where_they_were(hall: Hall) -> None:
    """With another epoch, so that every device says hello."""
    first, second = hall.run("a", "site=berlin"), hall.run("b", "site=berlin")
    device = Device(hall, "pi-1", site="berlin")
    device.say(device.hello)
    before = hall.router.epoch
    hall.broker.stop()
    hall.settle()
    hall.broker.start()
    hall.settle()
    assert hall.router.epoch != before
    links = [event for event in drained(first.inbox) if not isinstance(event, Received)]
    assert [type(event) for event in links] == [Connected, Disconnected, Connected]
    assert first.shared_epoch == hall.router.epoch
    device.say(device.hello)
    assert messages(first) == [("pi-1", device.hello)]
    assert messages(second) == []


def test_router_answers_a_device_of_another_version_whose_name_a_run_knows(hall: Hall) -> None:
    """What else cannot be read is for the run, which counts it."""
    run = hall.run("a")
    device = Device(hall, "pi-1")
    device.say(device.hello)
    drained(run.inbox)
    device.transport.publish(TOPICS.from_device("pi-1"), b"\x63" + encode(device.hello)[1:])
    device.transport.publish(TOPICS.from_device("pi-1"), encode(device.hello)[:1] + b"noise")
    hall.settle()
    assert [type(message) for message in device.messages()] == [Refused]
    [noise] = drained(run.inbox)
    assert isinstance(noise, Received)
    assert noise.payload.endswith(b"noise")


def test_router_expels_a_device(hall: Hall) -> None:
    hall.run("a", "site=berlin")
    device = Device(hall, "pi-1", site="berlin")
    device.say(device.hello)
    for name in ("pi-1", "pi-1", "nobody"):
        hall.router.expel(name)
    assert hall.router.members() == []


class TestRouterThatLeads:
    """Of several services with one record in PostgreSQL."""

    @pytest.fixture
    def leadership(self, postgresql: Postgresql) -> Iterator[Leadership]:
        made = Leadership(postgresql.schema())
        assert made.try_to_lead()
        yield made
        made.close()

    @pytest.fixture
    def hall(self, leadership: Leadership) -> Hall:
        return Hall(leadership)

    def test_its_epoch_has_its_term(self, hall: Hall, leadership: Leadership) -> None:
        assert term_of(hall.router.epoch) == leadership.term

    def test_a_coordinator_of_another_term_does_not_end_it(self, hall: Hall, leadership: Leadership) -> None:
        """However long that has served: the database decides, and not a message."""
        for term in (leadership.term - 1, leadership.term + 1):
            other = CoordinatorState(leading_epoch(term, 1), alive=True, owner="other", held_s=1e9)
            hall.router.events.put(Received(TOPICS.coordinator_state, encode(other)))
            hall.settle()
        device = Device(hall, "pi-1")
        device.say(device.hello)
        assert device.messages() == [Welcome("i1", hall.router.epoch, NO_WORK)]

    def test_it_sends_nothing_while_the_database_does_not_confirm_it(self, hall: Hall, leadership: Leadership) -> None:
        """Its runs wait as without a link; confirmed again it begins a new epoch, so that devices say hello."""
        run, device = hall.run("a"), Device(hall, "pi-1")
        device.say(device.hello)
        drained(run.inbox)
        epoch = hall.router.epoch
        leadership._confirmed_at -= 3600.0
        assert not run.publish(TOPICS.to_device("pi-1"), encode(RunEnded("a", "finished")))
        hall.router.pump(0.0)
        assert drained(run.inbox) == [Disconnected("leadership is not confirmed")]
        assert device.messages() == []
        wait_until(leadership.is_current)
        hall.router.pump(0.0)
        assert drained(run.inbox) == [Connected()]
        assert hall.router.epoch != epoch

    def test_it_ends_when_another_leads(self, hall: Hall, leadership: Leadership) -> None:
        with leadership._connect() as connection:
            connection.exec_driver_sql("update leadership set term = term + 1")
        with pytest.raises(LeadershipLost, check=has_code("FV1607")):
            wait_until(lambda: hall.router.pump(0.0))
        device = Device(hall, "pi-2")
        device.transport.publish(TOPICS.from_device("pi-2"), encode(device.hello))
        hall.router.close()
        assert device.messages() == []
