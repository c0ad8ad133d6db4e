"""The device on the home's own broker: a real mosquitto, and Home Assistant's documented rules."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_client.health.history import AgentState, LastTask
from edge_client.health.home import Home, remove_entities, try_connection
from edge_client.health.home_entities import HomeTopics
from edge_client.health.memory import OwnMemory
from edge_client.link.device_link import DeviceIdentity
from fedvit.data.folder import DeviceData
from fedvit.errors import LinkDown
from fedvit.resources import DeviceProfile
from fedvit.transport.address import Address
from profiles.probes.meter import Sensors
from tests.support.brokers import mosquitto
from tests.support.codes import has_code
from tests.support.home_assistant import MARK, HomeAssistant
from tests.support.waiting import wait_until

PROFILE = DeviceProfile(host="h", machine="aarch64", cores=4, threads=1)
IDENTITY = DeviceIdentity(device="pi_1", federation="home", software="1.2", profile=PROFILE)
BOARD = 'Raspberry "Pi" {{ 7 * 7 }} — 5'


def make_state(images: DeviceData, activity: str = "waiting for a task", last: LastTask | None = None) -> AgentState:
    return AgentState(
        connected=True, joined=True, activity=activity, task=None, progress=None, last_task=last, last_error=None,
        memory=OwnMemory(), peak_rss_bytes=None, waiting=0, answers={}, data=images,
    )  # fmt: skip


def make_task(number: int, right: float) -> LastTask:
    metrics = {"correct": right}
    return LastTask(run="run", round=number, kind="evaluate", outcome="done", samples=8, metrics=metrics, ended_s=0)


def make_sensors(root: Path) -> Sensors:
    """Make the kernel's files of a board with a thermometer and a battery."""
    zone, supply = root / "sys/class/thermal/thermal_zone0", root / "sys/class/power_supply/BAT0"
    for folder in (zone, supply):
        folder.mkdir(parents=True)
    (zone / "type").write_text("cpu-thermal\n")
    (zone / "temp").write_text("48200\n")
    (supply / "type").write_text("Battery\n")
    (supply / "capacity").write_text("81\n")
    (supply / "status").write_text("Discharging\n")
    return Sensors.find(root)


@contextmanager
def show_device(
    address: Address, identity: DeviceIdentity, sensors: Sensors, state: list[AgentState]
) -> Iterator[Home]:
    """Show a device whose state is the last one of `state`."""
    home = Home(address, identity, sensors)
    home.start()
    stop = threading.Event()

    def turn() -> None:
        while not stop.wait(0.01):
            home.look(lambda: state[-1])

    loop = threading.Thread(target=turn)
    loop.start()
    try:
        yield home
    finally:
        stop.set()
        loop.join()
        home.close(state[-1])


def test_all_entities_of_a_board_follow_its_state(tmp_path: Path, data: DeviceData) -> None:
    identity = replace(IDENTITY, profile=DeviceProfile(host="h", machine="m", cores=4, threads=1, board=BOARD))
    state = [make_state(data)]
    with (
        mosquitto(tmp_path / "broker", "retain_available true", password="secret") as broker,
        closing(HomeAssistant(broker.address)) as house,
    ):
        with show_device(broker.address, identity, make_sensors(tmp_path / "board"), state):
            wait_until(lambda: "battery" in house.list_keys() and comes(house, "activity", "waiting for a task"))
            assert house.list_keys() == {"online", "activity", "run", "round", "accuracy", "temperature", "battery"}
            assert house.state("online") == "on"
            assert (house.state("temperature"), house.state("battery")) == ("48", "81")
            assert house.state("accuracy") is house.state("round") is None
            state.append(make_state(data, f"not accepted yet: {{{{ x }}}} \"'\n\0 {'long ' * 90}", make_task(7, 6.0)))
            wait_until(lambda: house.state("accuracy") == "75.0")
            assert (house.state("round"), house.state("run")) == ("7", "run")
            assert str(house.state("activity")).startswith("not accepted yet: {{ x }} \"'\n\0 long")
            [entity] = [entity for name, entity in house.entities.items() if name.endswith("_battery")]
            assert entity["device"]["model"] == BOARD
            # the accuracy stays when the newest task is another one
            trained = LastTask(run="run", round=8, kind="train", outcome="done", ended_s=0)
            state.append(make_state(data, "training", trained))
            wait_until(lambda: house.state("round") == "8")
            assert house.state("accuracy") == "75.0"
        wait_until(lambda: house.state("online") == "off")
        assert house.state("activity") == "unavailable"
        assert not house.faults
        with closing(HomeAssistant(broker.address, "restarted")) as restarted:
            wait_until(lambda: len(restarted.entities) == 7, "the broker keeps the discovery")
        remove_entities(broker.address, HomeTopics("home", "pi_1"))
        wait_until(lambda: not house.entities)
        with closing(HomeAssistant(broker.address, "later")) as later:
            later.mark()
            assert (later.entities, later.states) == ({}, {MARK: b"here"})


def test_board_without_sensors_has_no_entities_of_them(tmp_path: Path, data: DeviceData) -> None:
    with (
        mosquitto(tmp_path / "broker", "retain_available true") as broker,
        closing(HomeAssistant(broker.address)) as house,
    ):
        with show_device(broker.address, IDENTITY, Sensors.find(tmp_path), [make_state(data)]):
            wait_until(lambda: "accuracy" in house.list_keys() and comes(house, "activity", "waiting for a task"))
            assert house.list_keys() == {"online", "activity", "run", "round", "accuracy"}
        assert not house.faults


def test_two_devices_of_one_name_in_two_federations(tmp_path: Path, data: DeviceData) -> None:
    with (
        mosquitto(tmp_path / "broker", "retain_available true") as broker,
        closing(HomeAssistant(broker.address)) as house,
    ):
        other = replace(IDENTITY, federation="garden")
        sensors, state = Sensors.find(tmp_path), [make_state(data)]
        with show_device(broker.address, IDENTITY, sensors, state), show_device(broker.address, other, sensors, state):
            wait_until(lambda: len(house.entities) == 10)
            remove_entities(broker.address, HomeTopics("garden", "pi_1"))
            wait_until(lambda: len(house.entities) == 5)


def test_device_comes_back_with_its_broker(tmp_path: Path, data: DeviceData) -> None:
    """Also when the broker was away at the start, and has forgotten everything."""
    state = [make_state(data)]
    with mosquitto(tmp_path / "broker", "retain_available true") as broker:
        broker.stop()
        with show_device(broker.address, IDENTITY, Sensors.find(tmp_path), state):
            for number in (1, 2):
                broker.restart()
                with closing(HomeAssistant(broker.address)) as house:
                    wait_until(partial(comes, house, "online", "on"))
                    state.append(make_state(data, f"activity {number}"))
                    wait_until(partial(comes, house, "activity", f"activity {number}"))
                broker.stop()
            broker.restart()


def comes(house: HomeAssistant, key: str, wanted: str) -> bool:
    return house.state(key) == wanted


def test_wrong_password_is_said(tmp_path: Path, data: DeviceData, caplog: pytest.LogCaptureFixture) -> None:
    with mosquitto(tmp_path / "broker", "retain_available true", password="secret") as broker:
        wrong = replace(broker.address, password="other")
        with pytest.raises(LinkDown, check=has_code("FV1471", "refused")):
            try_connection(wrong)
        with show_device(wrong, IDENTITY, Sensors.find(tmp_path), [make_state(data)]):
            wait_until(lambda: "no connection to the home's broker" in caplog.text)
        try_connection(broker.address)
    assert "other" not in caplog.text


def test_broker_that_says_nothing_delays_nothing(tmp_path: Path, data: DeviceData) -> None:
    """Its socket accepts the connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1])
        home = Home(address, IDENTITY, Sensors.find(tmp_path))
        home.start()
        connection, _ = silent.accept()
        state = make_state(data)
        for _ in range(1000):
            home.look(lambda: state)
        home.close(state)
        connection.close()


def test_nothing_at_the_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LinkDown, check=has_code("FV1471", str(port))):
        remove_entities(Address("127.0.0.1", port), HomeTopics("home", "pi"))
