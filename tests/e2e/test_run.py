"""The main job: edge processes and a coordinator train over a real broker."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.numpy

from coordinator.compute.planning.checks import checked_config
from fedvit.blobs import BlobStore
from fedvit.program import Role, decode_program
from fedvit.wire.messages import Progress, Welcome
from fleet import launch
from fleet.processes import Fleet
from profiles.predict import BASE_RSS_BYTES
from profiles.probes.host import parse_vm_hwm
from tests.support.forked import Forked
from tests.support.programs import (
    CONFIG,
    DEEP_LEARNING,
    DEVICES,
    ROUNDS,
    USUAL_UMASK,
    WAIT_S,
    Stage,
    open_to_others,
    program,
    said,
    wait_for,
)


def test_processes_train_and_nothing_local_leaves(stage: Stage, undisturbed: bytes) -> None:
    """Devices start first, the coordinator later; an independent client hears every payload at the broker. Most other
    tests of processes are over the embedded one."""
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "no connection to the broker" in stage.log("device-0"), "the device to report the missing broker")
    idle_bytes = psutil.Process(devices["device-0"].pid).memory_info().rss
    assert idle_bytes == pytest.approx(BASE_RSS_BYTES, rel=0.25), "plans of boards begin with this figure"
    coordinator = stage.coordinator(broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    wait_for(observer.find(Progress, round=2, device="device-1"), "round 2")
    for name, process in devices.items():
        launcher, *workers = psutil.Process(process.pid).children(recursive=True)
        assert not re.findall("onnxruntime", Path(f"/proc/{process.pid}/maps").read_text()), "graphs run elsewhere"
        for pid in (launcher.pid, *(worker.pid for worker in workers)):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "onnxruntime" in maps
            assert not [library for library in DEEP_LEARNING if f"/{library}" in maps], name
            peak = parse_vm_hwm(Path(f"/proc/{pid}/status").read_text())
            assert peak is not None
            assert peak < 160e6, name
        assert len(workers) == 1
    assert stage.finish(coordinator, "coordinator") == 0
    assert f"next: coordinator report run --out report.html --runs {stage.out}; " in stage.log("coordinator")
    for name, process in devices.items():
        assert stage.finish(process, name) == 0, stage.log(name)

    assert stage.model() == undisturbed  # whatever the network did, the numbers are those of the run in memory
    shown = stage.show()
    assert shown["status"] == "finished"
    assert [entry["accepted"] for entry in shown["rounds"]] == [3] * ROUNDS
    assert all(set(entry["accuracy"]) == set(DEVICES) for entry in shown["rounds"])
    assert shown["bytes_down"] > 0
    assert shown["bytes_up"] > 0
    assert not shown["refusals"]

    for kept in (stage.out, stage.folder / "state"):
        assert open_to_others(kept) == [], "features are images"

    bundle = stage.folder / "bundle"
    given = ["--data", stage.parts / "device-0", "--state", stage.folder / "state" / "device-0", "--out", bundle]
    command = [*program("edge_client.cli"), "export", "run", *map(str, given), "--precision", "fp32"]
    subprocess.run(command, check=True, capture_output=True, env=stage.environment, umask=USUAL_UMASK)
    assert (bundle / "card.json").stat().st_mode & 0o777 == 0o644, "what was asked for is as its owner likes it"
    accuracy = json.loads((bundle / "card.json").read_text())["files"]["fp32"]["accuracy"]
    assert accuracy["correct"] / accuracy["images"] == shown["rounds"][-1]["accuracy"]["device-0"]

    [(digest,)] = stage.query("select program from runs")
    held = decode_program(BlobStore(stage.out / "run" / "blobs").get(digest))
    local = [name for group in held.with_role(Role.LOCAL) for name in held.names(group)]
    personal = [
        array.tobytes()
        for name in DEVICES
        for file in stage.folder.glob(f"state/{name}/vault/run/round-*/local.safetensors")
        for array in safetensors.numpy.load(file.read_bytes()).values()
        if array.nbytes >= 64  # a shorter pattern could occur by chance
    ]
    assert len(local) > 10
    assert len(personal) > 30
    # a small upload comes inside the result, a larger one in chunks of which the first holds the names
    assert any(b'"features.1"' in payload for topic, payload in observer.drain() if "/up/" in topic)
    for topic, payload in observer.drain():
        assert not [1 for value in personal if value in payload], topic
        if "/up/" in topic:
            assert not [name for name in local if f'"{name}"'.encode() in payload], topic


def test_demo_interrupted_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    """`fleet demo` gets Ctrl-C while its devices train: every process that it started is gone."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    arguments = ["demo", "--out", str(tmp_path / "demo"), "--devices", "2", "--json"]
    demo = Forked("fleet.cli", arguments, tmp_path / "log", environment)

    def children() -> list[str]:
        lines = map(_command_line, Path("/proc").glob("[0-9]*/cmdline"))
        mine = [line.replace(b"\0", b" ").decode() for line in lines if str(tmp_path).encode() in line]
        return mine

    try:
        wait_for(lambda: len(children()) >= 3, "the coordinator and two devices")
        logs = tmp_path / "demo" / "runs"
        wait_for(lambda: any("joined" in log.read_text() for log in logs.glob("*/devices/*.log")), "a device to join")
        demo.send_signal(signal.SIGINT)
        assert demo.wait(WAIT_S) == 130
        wait_for(lambda: not children(), "all processes to be gone", timeout_s=10)
    finally:
        demo.kill()


def _command_line(path: Path) -> bytes:
    """Empty for a process that has ended since."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_second_device_with_the_same_id(stage: Stage) -> None:
    """The first keeps its place, and the run goes on. The second is told why whenever it asks, and nothing else; the
    coordinator's console has it once."""
    stage.coordinator()
    stage.device("device-0")
    observer = stage.observer()
    wait_for(lambda: "device-0 joined" in stage.log("coordinator"), "device-0")
    twin = stage.start(
        "twin",
        [
            *program("edge_client.cli"), "--broker", f"127.0.0.1:{stage.port}", "--data", str(stage.parts / "device-1"),
            "--state", str(stage.folder / "state" / "twin"), "--id", "device-0", "--threads", "1", "--once",
        ],
    )  # fmt: skip
    wait_for(lambda: stage.log("twin").count("is online already") >= 3, "the twin to be told again")
    assert "no coordinator answers" not in stage.log("twin")
    assert stage.log("coordinator").count("a second device with id 'device-0'") == 1
    twin.send_signal(signal.SIGTERM)
    assert stage.finish(twin, "twin") == 0
    found = observer.find(Welcome, device="device-1")
    stage.device("device-1")
    stage.device("device-2")
    wait_for(found, "device-1 to be welcome")
    wait_for(lambda: stage.query("select 1 from results where device = 'device-0'"), "the first device-0 to train")


@pytest.mark.slow
def test_device_that_stays_after_its_run(stage: Stage) -> None:
    """A wrong password is an error with a remedy. The broker of a run that has ended goes with it, which is none."""
    stage.environment["FEDVIT_BROKER_PASSWORD"] = "right"
    coordinator = stage.coordinator("--devices", "1", "--rounds", "1")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    command = [*program("edge_client.cli"), "--data", str(stage.parts / "device-0"), "--threads", "1"]

    def begin(name: str, password: str) -> tuple[list[str], subprocess.Popen[bytes]]:
        state = ["--state", str(stage.folder / name)]
        broker = f"mqtt://fedvit:{password}@127.0.0.1:{stage.port}"
        return state, stage.start(name, [*command, *state, "--broker", broker])

    def last_error(state: list[str]) -> str | None:
        found = json.loads(said(stage, "edge_client.cli", "status", *state, "--json"))["doing"]["last_error"]
        return found and str(found["what"])

    stranger, process = begin("stranger", "wrong")
    wait_for(lambda: "broker refused: not authorised" in stage.log("stranger"), "the stranger to be refused")
    assert "'edge-client doctor' looks for the cause" in stage.log("stranger")
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process, "stranger") == 0
    assert last_error(stranger) == "no connection to the broker: broker refused: not authorised"
    member, process = begin("member", "right")
    assert stage.finish(coordinator, "coordinator") == 0
    wait_for(lambda: "no connection to the broker" in stage.log("member"), "the device to lose the broker")
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process, "member") == 0
    assert "run ended" in stage.log("member")
    assert last_error(member) is None


def test_fleet_run_with_flags_alone(stage: Stage) -> None:
    """`fleet run` starts everything by itself, FedAvg by flags, and ends with one JSON object on standard output."""
    command = [*program("fleet.cli"), "run", "--parts", str(stage.parts), "--devices", "2", "--runs", str(stage.out)]
    command += ["--run", "run", "--broker", "embedded", "--broker.port", "0", "--json"]
    command += ["--method", "fedavg", "--rounds", "2", "--seed", "1", "--quorum", "1.0"]
    command += ["-o", "epochs=8", "-o", "lr=0.01", "-o", "momentum=0.9"]
    command += ["--model-option", "patch_size=8", "--model-option", "width=32", "--model-option", "depth=3"]
    command += ["--model-option", "heads=2", "--images.brightness", "0.1", "--images.crop-padding", "2"]
    done = subprocess.run(
        command, env=stage.environment, capture_output=True, text=True, timeout=WAIT_S, umask=USUAL_UMASK
    )
    assert done.returncode == 0, done.stderr
    assert open_to_others(stage.out) == []
    outcome = json.loads(done.stdout)
    assert outcome.keys() == {"mean_accuracy", "seconds", "max_edge_rss_bytes", "bytes_down", "bytes_up", "run"}
    assert outcome["run"] == "run"
    assert outcome["mean_accuracy"] == stage.show()["mean_accuracy"]
    assert 20e6 < outcome["max_edge_rss_bytes"] < 160e6
    assert all("run ended" in log.read_text() for log in (stage.out / "run" / "devices").iterdir())
    assert outcome["bytes_down"] > 100_000  # two graphs and the first values, to each of two devices
    assert (stage.out / "run" / "model.safetensors").is_file()
    assert sorted(path.name for path in (stage.out / "run" / "state").iterdir()) == ["device-0", "device-1"]
    shown = stage.show()
    assert shown["method"] == "fedavg"
    assert shown["rounds"][-1]["train_loss"] < shown["rounds"][0]["train_loss"]
    listed = [*program("coordinator.cli"), "runs", "--runs", str(stage.out)]
    assert "fedavg" in subprocess.run(listed, capture_output=True, check=True, text=True).stdout


@pytest.mark.slow
def test_fleet_run_ends_a_device_that_was_not_connected_at_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker ends with the coordinator: a device that comes later, as after a kill -9, would wait forever."""

    class WithTorch(Fleet):
        """Its coordinator is forked from a process that has torch."""

        def start(self, name: str, command: Sequence[str], *arguments: Any, **settings: Any) -> Any:
            if name != "coordinator":
                return super().start(name, command, *arguments, **settings)
            log = stage.log_path(name)
            self._running[name] = forked = Forked(
                "coordinator.cli", list(command[len(program("coordinator.cli")) :]), log, stage.environment
            )
            return forked

    monkeypatch.setattr(launch, "Fleet", WithTorch)
    monkeypatch.setattr(launch, "DEVICES_LEAVE_S", 2.0)
    values = {**CONFIG, "variants": {}, "rounds": 1, "devices": 1, "broker": {"broker": "embedded", "port": stage.port}}
    folder, state = str(stage.parts / "device-0"), str(stage.folder / "state")
    commands = {
        "device-0": [*program("edge_client.cli"), "--data", folder, "--state", state, "--id", "device-0", "--once"],
        "late": [sys.executable, "-c", "import time; time.sleep(600)"],
    }
    config = checked_config(values, "run")
    outcome = launch.run_processes(launch.Launch(config, stage.out / "run", commands, is_quiet=True, restarts=0))
    assert outcome.summary.status == "finished"
    assert "run ended" in (stage.out / "run" / "devices" / "device-0.log").read_text()
