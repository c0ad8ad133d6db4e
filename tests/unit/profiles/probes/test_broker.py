"""The way to the broker and back, through a real mosquitto."""

from collections.abc import Iterator

import pytest

from coordinator.security.broker import Broker
from fedvit.errors import LinkDown
from fedvit.transport.address import Address
from profiles.probes.broker import BrokerProbe, measure_round_trip
from tests.support.brokers import mosquitto
from tests.support.codes import has_code

ACCESS = "user fedvit\ntopic read fl1/home/d/pi/up/probe\ntopic readwrite open/#\n"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """What is longer than 1000 bytes it does not take; on the probe's topic nobody may write."""
    folder = tmp_path_factory.mktemp("broker")
    (folder / "rules").write_text(ACCESS)
    (folder / "rules").chmod(0o600)
    rules = (f"acl_file {folder / 'rules'}", "message_size_limit 1000")
    with mosquitto(folder, *rules, password="secret") as broker:
        yield broker


def test_a_message_is_acknowledged(broker: Broker) -> None:
    assert 0 < measure_round_trip(broker.address, "pi-1", "open/probe", tries=3) < 60


def test_what_is_too_large_is_not_taken(broker: Broker) -> None:
    """A broker that speaks version 5 ends the connection over it, with a reason; the next one works."""
    with BrokerProbe(broker.address, "pi-1", "open/probe") as probe:
        assert probe.seconds(900) is not None
        with pytest.raises(LinkDown, check=has_code("FV1209")):
            probe.seconds(1100)
    with BrokerProbe(broker.address, "pi-1", "open/probe") as probe:
        assert probe.seconds(64) is not None


def test_what_is_refused_is_named(broker: Broker) -> None:
    with pytest.raises(LinkDown):
        measure_round_trip(broker.address, "pi-1", "fl1/home/d/pi/up/probe")


def test_broker_that_does_not_listen() -> None:
    with pytest.raises(LinkDown, check=has_code("FV1209")):
        measure_round_trip(Address.parse("127.0.0.1:1"), "pi-1", "t")


def test_who_is_not_let_in_hears_why(broker: Broker) -> None:
    with pytest.raises(LinkDown):
        measure_round_trip(Address("localhost", broker.address.port, "fedvit", "wrong"), "pi-1", "t")
