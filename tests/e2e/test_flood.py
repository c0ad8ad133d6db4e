"""A device that has joined floods the coordinator: rounds go on, memory stays bounded, and it is shut out."""

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coordinator.record.record import Record
from fedvit.wire.messages import encode
from fleet.processes import Fleet
from tests.support.corpus import make_hello
from tests.support.deployed import ATTACKER, HONEST, RUN, WAIT_S, DeployedStage
from tests.support.mqtt_client import Client

pytestmark = pytest.mark.slow

MEGABYTE = 10**6
GROWTH_BYTES = 150 * MEGABYTE
"""The queue of a coordinator without limits grows by 800 MB in half a minute."""


def test_a_flood_ends_with_revocation(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hellos of 60 kB, each of which is refused, as fast as the broker takes them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    figures: dict[str, float] = {}
    with Fleet() as fleet:
        stage = DeployedStage(tmp_path, fleet)
        stage.check_service()
        coordinator = psutil.Process(stage.coordinator_pid)
        figures["rounds/s before"] = rounds_per_s(stage, lambda: time.sleep(5))
        before = peak = coordinator.memory_info().rss
        raws = [
            encode(make_hello(f"i{number}", tuple(f"{number}-{place}-" + "x" * 240 for place in range(230))))
            for number in range(8)
        ]
        topic = stage.topics.from_device(ATTACKER)

        def flood() -> None:
            nonlocal peak
            until = time.monotonic() + WAIT_S
            with Client(stage.parties.as_attacker, "flooder") as client:
                for number in itertools.count():
                    if not client.publish(topic, raws[number % 8], qos=0) or time.monotonic() > until:
                        break
                    peak = max(peak, coordinator.memory_info().rss if number % 50 == 0 else 0)
                figures["messages sent"] = number
                assert not client.connected, "it was never revoked"

        figures["rounds/s during"] = rounds_per_s(stage, flood)
        stage.check_service()
        after = coordinator.memory_info().rss
        figures |= {"MB before": before / MEGABYTE, "MB peak": peak / MEGABYTE, "MB after": after / MEGABYTE}
        print(json.dumps(figures))
        assert max(peak, after) - before < GROWTH_BYTES, figures
        with Client(stage.parties.as_attacker, "again") as again:
            assert not again.connected
        store = stage.store()
        try:
            kinds = {(entry.device, entry.kind) for entry in store.devices.read_refusals(RUN)}
            assert {(ATTACKER, "flood"), (ATTACKER, "hello")} <= kinds
            assert not {kind for device, kind in kinds if device == HONEST}
        finally:
            store.close()
    printed = (tmp_path / "coordinator.log").read_text()
    assert "its certificate is revoked" in printed
    assert printed.count("was refused") == 1, "one line, whatever the reasons"


def rounds_per_s(stage: DeployedStage, meanwhile: Callable[[], object]) -> float:
    """Rounds that close while something happens, per second."""
    store = stage.store()
    try:
        first, began = count_closed(store), time.monotonic()
        meanwhile()
        return (count_closed(store) - first) / (time.monotonic() - began)
    finally:
        store.close()


def count_closed(store: Record) -> int:
    return sum(record.closed_at is not None for record in store.rounds.read_all(RUN))
