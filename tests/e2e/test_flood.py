"""A device that has joined floods the coordinator: rounds go on, memory stays bounded, and it is shut out."""

import itertools
import time
from pathlib import Path

import psutil
import pytest

from fedvit.wire.messages import encode
from fleet.processes import Fleet
from tests.support.corpus import make_hello
from tests.support.deployed import ATTACKER, HONEST, RUN, WAIT_S, DeployedStage
from tests.support.mqtt_client import Client

pytestmark = pytest.mark.slow

GROWTH_BYTES = 150_000_000
"""The queue of a coordinator without limits grows by 800 MB in half a minute."""


def test_a_flood_ends_with_revocation(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hellos of 60 kB, each of which is refused, as fast as the broker takes them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with Fleet() as fleet:
        stage = DeployedStage(tmp_path, fleet)
        stage.check_service()
        coordinator = psutil.Process(stage.coordinator_pid)
        before = peak = coordinator.memory_info().rss
        raws = [
            encode(make_hello(f"i{number}", tuple(f"{number}-{place}-" + "x" * 240 for place in range(230))))
            for number in range(8)
        ]
        topic = stage.topics.from_device(ATTACKER)

        until = time.monotonic() + WAIT_S
        with Client(stage.parties.as_attacker, "flooder") as client:
            for number in itertools.count():
                if not client.publish(topic, raws[number % 8], qos=0) or time.monotonic() > until:
                    break
                peak = max(peak, coordinator.memory_info().rss if number % 50 == 0 else 0)
            assert not client.connected, "it was never revoked"
        stage.check_service()
        assert max(peak, coordinator.memory_info().rss) - before < GROWTH_BYTES
        with Client(stage.parties.as_attacker, "again") as again:
            assert not again.connected
        with stage.store() as store:
            kinds = {(entry.device, entry.kind) for entry in store.devices.read_refusals(RUN)}
            assert {(ATTACKER, "flood"), (ATTACKER, "hello")} <= kinds
            assert not {kind for device, kind in kinds if device == HONEST}
    printed = (tmp_path / "coordinator.log").read_text()
    assert "its certificate is revoked" in printed
    assert printed.count("was refused") == 1, "one line, whatever the reasons"
