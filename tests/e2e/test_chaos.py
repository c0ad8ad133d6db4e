"""Faults of every kind in a small federation, on loopback and over a bad network; and full disks.

Kills, a hanging device and a dead worker process: test_faults.py, test_stragglers.py, test_worker.py.
"""

import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.processes import last_line
from tests.support.federation import BROKER, COORDINATOR, PATIENCE_S, SCENARIO, Fault, Federation, count_duplicates
from tests.support.programs import DEVICES, ROUNDS, Stage, wait_for
from tests.support.proxy import Network
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.slow

VALUES = {**SCENARIO, "rounds": 3}
YEAR_S = 365 * 86_400.0
SCENARIOS = {
    "on loopback": (
        None,
        [
            Fault("hang", COORDINATOR), Fault("drop", "device-0"),
            Fault("descriptors", COORDINATOR), Fault("clock", "device-2", clock_s=-YEAR_S),
        ],
    ),
    "over a bad network": (
        Network(bits_per_s=2e6, latency_s=0.02, loss=0.02),
        [
            Fault("hang", BROKER), Fault("silence", "device-1"), Fault("descriptors", "device-0"),
            Fault("clock", COORDINATOR, clock_s=YEAR_S), Fault("power", "device-2"),
        ],
    ),
}  # fmt: skip
ROOM_BYTES = 8192
"""Enough for the log of a program, not for a tensor or the next page of its record."""


@pytest.fixture(scope="session")
def reference(calm_run: Callable[..., bytes]) -> bytes:
    """The tensors of a run without faults."""
    return calm_run("calm", VALUES)


@pytest.fixture
def federation(
    request: pytest.FixtureRequest, tmp_path: Path, parts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Federation]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    federation = Federation(tmp_path, [parts / name for name in DEVICES], VALUES, request.param)
    with federation.links:
        try:
            yield federation
        finally:
            federation.close()


class Runs:
    """Runs that follow each other while faults happen."""

    def __init__(self, federation: Federation, reference: bytes) -> None:
        self.federation = federation
        self.names: list[str] = []
        self.compared = 0
        self._reference = reference
        self.start_next()

    def start_next(self) -> None:
        self.names.append(f"chaos-{len(self.names) + 1}")
        self.federation.start_run(self.names[-1])

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, and start another run whenever one is finished."""

        def look() -> bool:
            self.federation.check_processes()
            if self.federation.exit_code() is not None:
                self.compare()
                self.start_next()
            return holds()

        wait_for(look, f"{what}; {last_line(self.federation.log(COORDINATOR))}", PATIENCE_S)

    def compare(self) -> None:
        """Compare the tensors with those of a run without faults, unless a device missed a round."""
        rounds = self.federation.query(
            "select json_extract(figures, '$.accepted') from rounds where run = ?", self.names[-1]
        )
        if all(accepted == len(DEVICES) for (accepted,) in rounds):
            path = self.federation.runs / self.names[-1] / "model.safetensors"
            assert path.read_bytes() == self._reference
            self.compared += 1


@pytest.mark.parametrize(("federation", "faults"), SCENARIOS.values(), ids=SCENARIOS, indirect=["federation"])
def test_federation_survives_faults(federation: Federation, reference: bytes, faults: list[Fault]) -> None:
    """After each fault a round with all devices closes; a second device with an id is refused; no result counts
    twice; the tensors are those of a run without faults."""
    for name in DEVICES:
        federation.start_device(name)
    runs = Runs(federation, reference)
    for fault in faults:
        runs.wait(federation.is_ready, "a round")
        federation.inject(fault)
        complete = federation.count_complete_rounds()
        runs.wait(lambda: federation.count_complete_rounds() > complete, f"a round after {fault}")  # noqa: B023
    twin = federation.start_process("twin", "device-1")
    try:
        runs.wait(lambda: "is online already" in federation.log("twin").read_text(), "the refusal of a second device-1")
    finally:
        twin.terminate()
        twin.wait(WAIT_S)
    finished = len(runs.names)
    runs.wait(lambda: len(runs.names) > finished and runs.compared > 0, "a run to compare")
    assert sum(count_duplicates(federation.runs / name / "coordinator.log") for name in runs.names) == 0


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
    stage.finish_run(coordinator, devices)
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
    stage.finish_run(coordinator, devices)
    shown = stage.show()
    assert shown["status"] == "finished"
    assert shown["rounds"][missed - 1]["accepted"] == 2
    assert stage.query(f"select 1 from results where device = 'device-0' and kind = 'train' and round > {missed}")
