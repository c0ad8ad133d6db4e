"""Many rounds leave nothing behind in memory: neither at the coordinator nor at the devices of a host."""

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from coordinator.rounds.coordinator import Coordinator
from fedvit.errors import ConfigError
from fleet import simulate as simulation
from fleet.devices import device_folders, virtual_devices
from fleet.partition import DealSettings, deal
from fleet.request import RunRequest
from fleet.virtual import Host, share
from tests.support.codes import has_code
from tests.support.tiny import TINY_MODEL

DEVICES = 4
ROUNDS = 4
ROOMS = ("coordinator", "edge_client", "fedvit", "fleet")
CONTAINERS = (dict, list, set, deque)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dealt") / "parts"
    deal("digits", "iid", 2, out, DealSettings(test_share=0.98))
    return out


def sizes(what: Any, name: str, depth: int = 2) -> dict[str, int]:
    """How much every container of an object holds, and of the objects of ours that it holds."""
    found: dict[str, int] = {}
    for key, value in vars(what).items():
        if key == "_checks":  # of deadlines: those of ended tasks go when there are many
            continue
        if isinstance(value, CONTAINERS):
            found[f"{name}.{key}"] = len(value)
        elif depth and type(value).__module__.split(".")[0] in ROOMS and hasattr(value, "__dict__"):
            found |= sizes(value, f"{name}.{key}", depth - 1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "pfedpg"])
def test_nothing_accumulates(
    parts: Path, tmp_path: Path, graph_cache: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """After the second round, when every device has been met, everything is as large as after the last."""
    seen: list[dict[str, int]] = []
    hosts: list[Host] = []

    class Counted(Coordinator):
        def __init__(self, *parts: Any, **more: Any) -> None:
            super().__init__(*parts, **more)
            finish = self.ports.journal.finish

            def count(number: int, **named: Any) -> None:
                finish(number, **named)
                seen.append(sizes(self, "coordinator"))

            monkeypatch.setattr(self.ports.journal, "finish", count)

    class Remembered(Host):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            hosts.append(self)

    monkeypatch.setattr(simulation, "Coordinator", Counted)
    monkeypatch.setattr(simulation, "Host", Remembered)
    values = {"method": method, "rounds": ROUNDS, "options": {"batch_size": 8}, "model_options": TINY_MODEL}
    devices = virtual_devices(parts, DEVICES)
    outcome = simulation.simulate(RunRequest(devices, values, out=tmp_path, run="run", graph_cache=graph_cache))
    assert outcome.summary.status == "finished"
    assert [entry.accepted for entry in outcome.summary.rounds] == [DEVICES] * ROUNDS
    assert seen[1] == seen[-1]
    assert seen[1]["coordinator.state.presence._devices"] == DEVICES
    [host] = hosts
    for name, agent in host.agents.items():
        held = sizes(agent, name, depth=3)
        empty = (
            "link.answers._waiting",
            "link.exchange._receiver.transfers",
            "link.exchange._chunks._sending",
            "link.exchange._leads",
            "link.exchange._fetches.waiting",
        )
        assert [held[f"{name}.{key}"] for key in empty] == [0] * len(empty)
        assert held[f"{name}.storage._programs"] == 1
    blobs = [path for path in (tmp_path / "run" / "state" / "blobs").glob("*/*") if path.is_file()]
    kept = set().union(*(agent.storage.blobs.held for agent in host.agents.values()))
    assert len(blobs) <= len(kept)  # those of earlier rounds are gone
    for name in devices:
        assert (tmp_path / "run" / "state" / name / "blobs").resolve() == (tmp_path / "run" / "state" / "blobs")


def test_folders_are_dealt_out_in_turn(parts: Path) -> None:
    devices = virtual_devices(parts, 5)
    assert list(devices) == [f"device-{number}" for number in range(5)]
    assert [folder.name for folder in devices.values()] == ["device-0", "device-1", "device-0", "device-1", "device-0"]
    halves = [share(devices, number, 2) for number in (0, 1)]
    assert halves[0] | halves[1] == devices
    assert [len(half) for half in halves] == [3, 2]


def test_other_names_are_no_devices(tmp_path: Path) -> None:
    for name in ("device-10", "device-9", "device-9 (copy)", "device-pi", "device-"):
        (tmp_path / name).mkdir()
    assert [folder.name for folder in device_folders(tmp_path, None)] == ["device-9", "device-10"]


def test_no_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2101")):
        virtual_devices(tmp_path, 3)
