"""Waits before a connection is tried again."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from coordinator.security.broker import Broker, start_broker
from fedvit.transport import backoff
from fedvit.transport.backoff import FIRST_RETRY_S, LAST_RETRY_S, SETTLED_S, Backoff
from fedvit.transport.base import Connected, Disconnected
from fedvit.transport.mqtt import MqttTransport
from fedvit.transport.mqtt_loop import MqttLoop
from tests.support.waiting import WAIT_S

Drawn = list[tuple[float, float]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The bounds of each random number; the lower one is what comes out."""
    bounds: Drawn = []

    def lowest(low: float, high: float) -> float:
        bounds.append((low, high))
        return low

    monkeypatch.setattr(backoff.random, "uniform", lowest)
    return bounds


@pytest.mark.usefixtures("drawn")
def test_backoff_doubles_up_to_a_limit_and_begins_anew_after_a_good_link() -> None:
    waits = Backoff()
    lowest = [waits.wait_s(None) for _ in range(7)]
    assert lowest == [min(LAST_RETRY_S, FIRST_RETRY_S * 2**failures) / 2 for failures in range(7)]
    assert waits.wait_s(SETTLED_S - 1) == LAST_RETRY_S / 2, "it was up, but not for long"
    assert waits.wait_s(SETTLED_S + 1) == FIRST_RETRY_S / 2


def test_backoff_spreads_only_the_return_after_a_link_that_was_up(drawn: Drawn) -> None:
    waits = Backoff(spread_s=60.0)
    waits.wait_s(None)
    assert (0.0, 60.0) not in drawn
    waits.wait_s(1.0)
    assert (0.0, 60.0) in drawn


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = start_broker("mosquitto", tmp_path, port=0)
    yield broker
    broker.stop()


@pytest.mark.parametrize("shared", [False, True])
def test_transport_spreads_its_return_after_a_lost_link(broker: Broker, drawn: Drawn, shared: bool) -> None:
    inbox: SimpleQueue[object] = SimpleQueue()
    loop = MqttLoop()
    transport = MqttTransport(inbox, broker.address, "pi", return_spread_s=60.0, loop=loop if shared else None)
    try:
        transport.open()
        assert isinstance(inbox.get(timeout=WAIT_S), Connected)
        assert drawn == []
        transport.spread_return(90.0)  # the coordinator of a large fleet has announced it
        broker.stop()
        assert any(isinstance(inbox.get(timeout=WAIT_S), Disconnected) for _ in itertools.repeat(None))
        broker.tend()
        assert any(isinstance(inbox.get(timeout=WAIT_S), Connected) for _ in itertools.repeat(None))
        assert drawn.count((0.0, 90.0)) == 1, "attempts that fail are spread enough by then"
    finally:
        transport.close()
        loop.close()
