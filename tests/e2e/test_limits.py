"""A small run at a broker with limits: a real mosquitto behind a proxy that disconnects a client which breaks one."""

import signal

import pytest

from fedvit.errors import ConfigError
from fedvit.wire.limits import BrokerLimits
from tests.support.brokers import mosquitto
from tests.support.limiting import limiting
from tests.support.programs import DEVICES, Stage, wait_for

LIMITS = BrokerLimits(65_536, publishes_per_s=50, topics_per_subscribe=2, max_inflight=2)
FLAGS = [f"--broker.{name.replace('_', '-')}={getattr(LIMITS, name)}" for name in LIMITS.__struct_fields__]


@pytest.mark.slow
def test_run_at_a_broker_with_limits(stage: Stage, undisturbed: bytes) -> None:
    """Without them in its configuration it does not get anywhere. Resumed with them it does, and running devices learn
    them. The broker takes no retained message either."""
    with mosquitto(stage.folder / "broker") as broker, limiting(broker.address, limits=LIMITS, retains=False) as proxy:
        stage.port = proxy.address.port
        url = f"mqtt://{proxy.address}"
        coordinator = stage.coordinator(broker=url)
        devices = {name: stage.device(name) for name in DEVICES}
        wait_for(lambda: proxy.broken, "a limit that is broken")
        coordinator.send_signal(signal.SIGINT)
        assert stage.finish(coordinator, "coordinator") == 130
        proxy.broken.clear()
        assert stage.finish(stage.coordinator(*FLAGS, broker=url, resume=True), "coordinator") == 0
        assert {name: stage.finish(process, name) for name, process in devices.items()} == dict.fromkeys(DEVICES, 0)
        assert proxy.broken == []
    assert stage.model() == undisturbed


def test_broker_that_announces_less_than_a_chunk_needs(stage: Stage) -> None:
    """One line names the sizes and the remedy."""
    with mosquitto(stage.folder / "broker", "max_packet_size 80000") as broker:
        assert (
            stage.finish(stage.coordinator(broker=f"mqtt://{broker.address}"), "coordinator") == ConfigError.exit_code
        )
    said = "the broker takes packets of 80000 bytes, and those with chunks of blobs have 127296: "
    assert said + "set max_payload_bytes = 79744 in [broker]" in stage.log("coordinator")
    assert "Traceback" not in stage.log("coordinator")
