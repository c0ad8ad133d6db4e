"""Each fault of `python -m bench chaos` in a small federation, and what a full disk means to a coordinator."""

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bench.chaos.network import Network
from bench.chaos.scenario import SCENARIO, run_scenario, undisturbed_run
from bench.chaos.schedule import BROKER, COORDINATOR, DEVICE, KINDS, Fault, draw_schedule
from tests.support.forked import Forked
from tests.support.once import made_once
from tests.support.programs import DEVICES, ROUNDS, Stage, wait_for

VALUES = {**SCENARIO, "rounds": 3}
SEED = 11
NETWORKS = {"on loopback": None, "over a bad network": Network.parse("2mbit,20ms,2%")}
"""Each has a part of the faults."""
ELSEWHERE = {("kill", COORDINATOR), ("kill", BROKER), ("hang", DEVICE), ("full", COORDINATOR)}
"""Faults that other tests make happen at a chosen moment: test_faults.py, test_stragglers.py, and below."""
ROOM_BYTES = 8192
"""Enough for the log of a program, not for a tensor or the next page of its record."""


def schedule() -> list[Fault]:
    """One fault of every kind on every sort of target, but for those that are elsewhere."""
    faults = draw_schedule(SEED, DEVICES, duration_s=1000.0, every_s=1.0, longest_s=2.0)
    every_pair = faults[: sum(len(kind.targets) for kind in KINDS.values())]
    return [fault for fault in every_pair if (fault.kind, sort_of(fault.target)) not in ELSEWHERE]


def sort_of(target: str) -> str:
    return DEVICE if target in DEVICES else target


@pytest.fixture(scope="session")
def reference(shared: Path, parts: Path, graph_cache: Path) -> bytes:
    folders = [parts / name for name in DEVICES]

    def run(out: Path) -> None:
        (out / "model").write_bytes(undisturbed_run(folders, VALUES, out, graph_cache))

    return (made_once(shared / "e2e" / "calm", run) / "model").read_bytes()


@pytest.fixture
def start(cache: Path) -> Iterator[Callable[[str, str, Sequence[str], Path], Forked]]:
    """Programs are forked from a process that has torch; none outlives the test."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
    started: list[Forked] = []

    def start(_name: str, module: str, arguments: Sequence[str], log: Path) -> Forked:
        started.append(Forked(module, list(arguments), log, environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(20)


def test_schedule_has_faults_of_all_kinds() -> None:
    assert {fault.kind for fault in schedule()} == set(KINDS)


@pytest.mark.parametrize("network", NETWORKS)
def test_federation_survives_faults(
    tmp_path: Path, parts: Path, reference: bytes, start: Callable[..., Forked], network: str
) -> None:
    """After each fault a round with all devices closes; no result counts twice; the tensors are those of a run without
    faults, also over 2 Mbit/s with 20 ms and 2 % loss."""
    folders = [parts / name for name in DEVICES]
    outcome = run_scenario(
        tmp_path,
        folders,
        schedule()[list(NETWORKS).index(network) :: len(NETWORKS)],
        values=VALUES,
        reference=reference,
        duration_s=0,
        seed=SEED,
        start=start,
        network=NETWORKS[network],
    )
    assert [entry.fault for entry in outcome.injected if entry.recovered_s is None] == []
    assert outcome.duplicates_applied == 0
    assert outcome.runs_compared == outcome.runs_equal > 0
    assert outcome.rounds_complete >= len(outcome.injected)
    assert {"coordinator", "broker", *DEVICES} <= set(outcome.memory)
    assert outcome.carried_down_bytes > outcome.carried_up_bytes > 0


def test_coordinator_with_a_full_disk_pauses(stage: Stage, undisturbed: bytes) -> None:
    """No file may grow beyond ROOM_BYTES from the first result of a round on. The run stands still and says why; no
    device is sent away. In round 1 the disk has space again; in round 2 the coordinator is interrupted while it waits,
    in round 3 it is killed, and each time it is resumed. It ends as if nothing had been."""
    coordinator = stage.coordinator()
    devices = {name: stage.device(name) for name in DEVICES}
    for number, end in enumerate(("room again", "ctrl-c", "killed"), start=1):
        wait_for(lambda: stage.query(f"select 1 from results where round = {number}"), f"a result of round {number}")  # noqa: B023
        said = stage.log("coordinator").count("paused: ")
        resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, resource.RLIM_INFINITY))
        wait_for(lambda: stage.log("coordinator").count("paused: ") > said, "the coordinator to pause")  # noqa: B023
        before = stage.query("select count(*) from results")
        if end == "room again":
            resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            wait_for(lambda: "run resumed" in stage.log("coordinator"), "the run to be resumed")
        else:
            coordinator.send_signal(signal.SIGKILL if end == "killed" else signal.SIGINT)
            assert stage.finish(coordinator, "coordinator") == (-signal.SIGKILL if end == "killed" else 130)
            assert stage.query("select count(*) from results") == before
            assert all(process.poll() is None for process in devices.values())
            coordinator = stage.coordinator(resume=True)
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert all(stage.finish(process, name) == 0 for name, process in devices.items())
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [3] * ROUNDS
    assert stage.model() == undisturbed


def test_device_with_a_full_disk_misses_rounds_and_returns(stage: Stage) -> None:
    """It says why, others go on, and when it has room again it takes part. An evaluation that it misses costs nothing
    of a round; a training does."""
    coordinator = stage.coordinator()
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: stage.query("select 1 from results where device = 'device-0'"), "a result of device-0")
    resource.prlimit(devices["device-0"].pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, resource.RLIM_INFINITY))
    refused = "select round from refusals where device = 'device-0' and kind = 'train' and reason like '%too large%'"
    [(missed,), *_] = wait_for(lambda: stage.query(refused), "device-0 to say why it cannot train")
    resource.prlimit(devices["device-0"].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert all(stage.finish(process, name) == 0 for name, process in devices.items())
    shown = stage.show()
    assert shown["status"] == "finished"
    assert shown["rounds"][missed - 1]["accepted"] == 2
    assert stage.query(f"select 1 from results where device = 'device-0' and kind = 'train' and round > {missed}")
