"""Programs of an older version and of this one together, as after an update of a part of a fleet (`make test-mixed`).

Each side has its own installation, and is driven by its commands alone. FEDVIT_OTHER names the bin folder of the older.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.federation import deal_digits
from tests.support.programs import CONFIG, query_record, toml, wait_for

NEW = Path(sys.executable).parent
OLD = Path(os.environ.get("FEDVIT_OTHER", "not-named"))
DEVICES = ("device-0", "device-1", "device-2")
ROUNDS = 4
PATIENCE_S = 400.0
VALUES: dict[str, Any] = {**CONFIG, "rounds": ROUNDS, "devices": len(DEVICES), "deadline_s": 600.0, "variants": {}}
PERSONAL: dict[str, Any] = {
    **VALUES,
    "method": "fedper",
    "options": {"epochs": 4, "batch_size": 8, "lr": 1e-3},
}


class Fleet:
    """Processes of both versions around one folder of runs and one broker's port; nothing of it outlives a test."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runs = home / "runs"
        self.port = claim_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        deal_digits(home / "images", DEVICES)

    def start(self, side: Path, log: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of the version in `side`; its output is appended to the log."""
        with self.log_path(log).open("ab") as output:
            process = subprocess.Popen(
                [str(side / program), *arguments], stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.home
            )
        self._processes.append(process)
        return process

    def log_path(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def start_coordinator(self, side: Path, *arguments: str) -> subprocess.Popen[bytes]:
        broker = ("--broker", "mosquitto", "--broker.port", str(self.port))
        return self.start(side, "coordinator", "coordinator", "start", "--runs", str(self.runs), *broker, *arguments)

    def start_run(self, side: Path, values: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start a coordinator with the run `run`."""
        file = self.home / "run.toml"
        file.write_text(toml(values))
        return self.start_coordinator(side, "--config", str(file), "--run", "run")

    def start_device(self, side: Path, name: str) -> subprocess.Popen[bytes]:
        where = ("--broker", f"127.0.0.1:{self.port}", "--data", str(self.home / "images" / name))
        state = ("--state", str(self.home / "state" / name), "--id", name)
        return self.start(side, name, "edge-client", *where, *state, "--threads", "1")

    def wait_for_rounds(self, count: int) -> None:
        """Wait until the run has so many closed rounds."""
        sql = "select count(*) from rounds where closed_at is not null"
        wait_for(lambda: (self._query(sql) or [(0,)])[0][0] >= count, f"round {count}", PATIENCE_S)

    def finish(self, coordinator: subprocess.Popen[bytes], side: Path) -> dict[str, Any]:
        """Wait for the end of the run; return what the version that served it shows of it."""
        try:
            code = coordinator.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, "\n".join(file.read_text()[-2000:] for file in sorted(self.home.glob("*.log")))
        shown = self.show(side)
        assert shown is not None
        return shown

    def show(self, side: Path) -> dict[str, Any] | None:
        """Return the answer of `coordinator show --json` of a version; None: it cannot read the record."""
        command = [str(side / "coordinator"), "show", "run", "--runs", str(self.runs), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode and any(word in done.stderr for word in ("newer version", "unknown version")):
            return None
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def tensors(self) -> bytes:
        return (self.runs / "run" / "model.safetensors").read_bytes()

    def close(self) -> None:
        """Terminate all processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _query(self, sql: str) -> list[tuple[Any, ...]]:
        return query_record(self.runs, sql)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    """Make fleets with folders of their own."""
    fleets: list[Fleet] = []

    def make(name: str) -> Fleet:
        home = tmp_path / name
        home.mkdir()
        fleets.append(Fleet(home))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def check_whole(shown: dict[str, Any]) -> None:
    """Check that each device's result was accepted in each round."""
    assert shown["status"] == "finished"
    assert [entry["accepted"] for entry in shown["rounds"]] == [len(DEVICES)] * ROUNDS
    assert not shown["refusals"]


@pytest.mark.parametrize("values", [VALUES, PERSONAL], ids=["eftvit", "fedper"])
@pytest.mark.parametrize(
    ("server", "devices"),
    [
        pytest.param(NEW, (OLD, OLD, OLD), id="new-server-old-devices"),
        pytest.param(NEW, (OLD, NEW, OLD), id="new-server-one-device-updated"),
        pytest.param(OLD, (NEW, NEW, NEW), id="old-server-new-devices"),
    ],
)
def test_both_versions_train_together(
    make_fleet: Callable[[str], Fleet], server: Path, devices: tuple[Path, ...], values: dict[str, Any]
) -> None:
    """Every device takes part in every round, whichever side was updated first. The new version reads the record of
    the old one, or says that it cannot."""
    fleet = make_fleet("mixed")
    coordinator = fleet.start_run(server, values)
    for name, side in zip(DEVICES, devices, strict=True):
        fleet.start_device(side, name)
    check_whole(fleet.finish(coordinator, server))
    shown = fleet.show(NEW)
    assert shown is None or shown["status"] == "finished"


@pytest.mark.parametrize("values", [VALUES, PERSONAL], ids=["eftvit", "fedper"])
def test_update_in_the_middle_of_a_run(make_fleet: Callable[[str], Fleet], values: dict[str, Any]) -> None:
    """The coordinator is killed and goes on in the new version; then the devices are updated, one after the other.

    Where the new version does not know the record of the old one, it says so, and the old one goes on."""
    fleet = make_fleet("updated")
    coordinator = fleet.start_run(OLD, values)
    devices = {name: fleet.start_device(OLD, name) for name in DEVICES}
    fleet.wait_for_rounds(1)
    coordinator.kill()
    coordinator.wait()
    side = OLD if fleet.show(NEW) is None else NEW
    coordinator = fleet.start_coordinator(side, "--resume")
    for number, (name, process) in enumerate(devices.items(), start=2):
        fleet.wait_for_rounds(min(number, ROUNDS - 1))
        process.kill()
        process.wait()
        fleet.start_device(NEW, name)
    shown = fleet.finish(coordinator, side)
    assert shown["status"] == "finished"
    assert len(shown["rounds"]) == ROUNDS


def test_older_version_leaves_a_newer_record_as_it_is(make_fleet: Callable[[str], Fleet]) -> None:
    """Who goes back to the older version after a run of the newer one either reads the record or is refused."""
    fleet = make_fleet("back")
    coordinator = fleet.start_run(NEW, {**VALUES, "rounds": 1})
    for name in DEVICES:
        fleet.start_device(NEW, name)
    shown = fleet.finish(coordinator, NEW)
    fleet.show(OLD)
    assert fleet.show(NEW) == shown
