"""The way to the broker and back, through a real mosquitto."""

from collections.abc import Iterator

import pytest

from coordinator.broker import Broker
from fedvit.errors import LinkDown
from fedvit.transport.mqtt import Address
from profiles.probes import broker as broker_module
from profiles.probes.broker import Echo, measure_round_trip
from tests.brokers import mosquitto

ACCESS = "user fedvit\ntopic read fl1/home/d/pi/echo\ntopic readwrite open/#\n"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """What is longer than 1000 bytes it does not take; on the echo's topic nobody may write."""
    folder = tmp_path_factory.mktemp("broker")
    (folder / "rules").write_text(ACCESS)
    (folder / "rules").chmod(0o600)
    rules = (f"acl_file {folder / 'rules'}", "message_size_limit 1000")
    with mosquitto(folder, *rules, password="secret") as broker:
        yield broker


def test_a_message_comes_back(broker: Broker) -> None:
    assert 0 < measure_round_trip(broker.address, "pi-1", "open/echo", tries=3) < 60


def test_what_is_too_large_does_not_come_back(broker: Broker) -> None:
    """A broker that speaks version 5 ends the connection over it, with a reason; the next one works."""
    with Echo(broker.address, "pi-1", "open/echo") as echo:
        assert echo.seconds(900) is not None
        with pytest.raises(LinkDown, match="protocol error"):
            echo.seconds(1100)
    with Echo(broker.address, "pi-1", "open/echo") as echo:
        assert echo.seconds(64) is not None


def test_what_does_not_come_back_is_named(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "ECHO_S", 0.3)
    monkeypatch.setattr(Echo.seconds, "__defaults__", (0.3,))
    with pytest.raises(LinkDown, match="connected, but a message on fl1/home/d/pi/echo did not come back"):
        measure_round_trip(broker.address, "pi-1", "fl1/home/d/pi/echo")


def test_nobody_listens() -> None:
    with pytest.raises(LinkDown, match=r"^127\.0\.0\.1:1: connection refused$"):
        measure_round_trip(Address.parse("127.0.0.1:1"), "pi-1", "t")


def test_who_is_not_let_in_hears_why(broker: Broker) -> None:
    with pytest.raises(LinkDown, match="broker refused: not authorised"):
        measure_round_trip(Address("localhost", broker.address.port, "fedvit", "wrong"), "pi-1", "t")
