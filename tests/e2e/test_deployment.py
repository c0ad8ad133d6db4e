"""A deployment from nothing: made, joined by token, trained over mutual TLS, and one device revoked in mid-run."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from coordinator.rounds.status import read_members
from coordinator.security.broker.process import claim_port
from tests.support.forked import Forked
from tests.support.programs import DEVICES, ROUNDS, Stage, program, said, wait_for
from tests.support.waiting import WAIT_S


def make_deployment(stage: Stage) -> str:
    folder = str(stage.folder / "deployment")
    ports = [str(claim_port()) for _ in range(2)]
    said(
        stage, "coordinator.cli", "init", folder, "--listen", "127.0.0.1", "--host", "localhost",
        "--port", ports[0], "--enrolment-port", ports[1], "--federation", "fleet-7",
    )  # fmt: skip
    return folder


def join_device(stage: Stage, folder: str, name: str) -> "subprocess.Popen[bytes]":
    """Enrol a device, and start it."""
    token = said(stage, "coordinator.cli", "enroll", name, "--deployment", folder, "--no-wait").split()[-1]
    state = str(stage.folder / "state" / name)
    said(stage, "edge_client.cli", "join", token, "--state", state)
    command = [*program("edge_client.cli"), "--data", str(stage.parts / name), "--state", state]
    return stage.start(name, [*command, "--threads", "1", "--once"])


def test_join_train_and_revoke(stage: Stage) -> None:
    """device-1 trains so long that it is revoked while it does. It is cut off and stays out; the round closes without
    it at once, not at its deadline, and the run goes on with device-0."""
    folder = make_deployment(stage)
    given = ["--devices", "2", "--broker.deployment", folder, "--variant", "device-1:epochs=3000"]
    coordinator = stage.coordinator(*given, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    devices = {name: join_device(stage, folder, name) for name in ("device-0", "device-1")}
    wait_for(lambda: stage.query("select 1 from results where device = 'device-0'"), "a result of device-0")
    assert not stage.query("select 1 from results where device = 'device-1'")
    devices["device-0"].send_signal(signal.SIGSTOP)  # the run, and its broker, are there until device-1 tried to return
    assert "is revoked" in said(stage, "coordinator.cli", "revoke", "device-1", "--deployment", folder)
    # by then the broker has ended its connection
    wait_for(lambda: "revoked or expired" in stage.log("device-1"), "device-1 to be refused")
    devices["device-0"].send_signal(signal.SIGCONT)
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(devices["device-0"], "device-0") == 0, stage.log("device-0")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [1] * ROUNDS
    assert all(set(entry["accuracy"]) == {"device-0"} for entry in shown["rounds"])
    assert stage.query("select distinct device from results") == [("device-0",)]
    assert ("device-1", "its certificate was revoked") in stage.query("select device, reason from refusals")
    assert not stage.query("select 1 from refusals where reason like '%deadline%' or reason like '%offline%'")
    assert stage.query("select round, outcome from tasks where device = 'device-1'") == [(1, "revoked")]
    assert "round 1: train closed without device-1 (revoked)" in stage.log("coordinator")
    listed = json.loads(said(stage, "coordinator.cli", "devices", "--deployment", folder, "--json"))
    assert {entry["device"]: entry["state"] for entry in listed} == {"device-0": "valid", "device-1": "revoked"}
    [(newest,)] = stage.query("select max(received_at) from results")
    assert listed[0]["last_seen"][:19] >= newest[:19]
    seen = {member.device: member.seen for member in read_members(stage.out / "run")}
    assert seen["device-0"][:19] >= newest[:19]
    assert devices["device-1"].poll() is None  # it goes on trying; its owner decides
    key = (stage.folder / "state" / "device-0" / "identity" / "key.pem").read_bytes()
    for file in Path(folder).rglob("*"):
        assert not file.is_file() or key not in file.read_bytes()
    assert "Traceback" not in "".join(stage.log(name) for name in ("coordinator", *devices))


def test_coordinator_takes_over_from_enroll_that_waits(stage: Stage) -> None:
    """`enroll` was typed first, or while `start` made its plan: it serves the deployment until `start` does."""
    folder = make_deployment(stage)
    enroll = stage.start("enroll", [*program("coordinator.cli"), "enroll", "device-0", "--deployment", folder])
    wait_for(lambda: "waiting for it" in stage.log("enroll"), "the token")
    coordinator = stage.coordinator("--devices", "1", "--broker.deployment", folder, broker="auto")
    wait_for(lambda: "a coordinator serves this deployment now" in stage.log("enroll"), "the coordinator")
    token = next(line for line in stage.log("enroll").splitlines() if line.startswith("edge-client join")).split()[-1]
    state = str(stage.folder / "state" / "device-0")
    said(stage, "edge_client.cli", "join", token, "--state", state, "--patience", "5m")
    assert stage.finish(enroll, "enroll") == 0, stage.log("enroll")
    device = [*program("edge_client.cli"), "--data", str(stage.parts / "device-0"), "--state", state, "--threads", "1"]
    started = stage.start("device-0", [*device, "--once"])
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(started, "device-0") == 0, stage.log("device-0")


@pytest.mark.slow
def test_service_does_not_wait_for_revoked_devices(stage: Stage) -> None:
    """One is revoked in the middle of a round, one while no service runs: the service that resumes the round closes it
    with the third one's result."""
    folder = make_deployment(stage)

    def serve() -> Forked:
        given = ["serve", "--runs", str(stage.out), "--broker.deployment", folder]
        return stage.fork("service", *given)

    def revoke(name: str) -> None:
        said(stage, "coordinator.cli", "revoke", name, "--deployment", folder)

    long = {"epochs": 3000}
    stage.submit("main", devices=3, rounds=2, variants={"device-1": long, "device-2": long})
    service = serve()
    wait_for(lambda: "broker: mosquitto" in stage.log("service"), "the broker")
    device = {name: join_device(stage, folder, name) for name in DEVICES}["device-0"]
    wait_for(lambda: stage.query("select 1 from results where device = 'device-0'"), "a result of device-0")
    ends = "select device, outcome from tasks where round = 1 order by device"
    assert stage.query(ends) == [("device-0", "accepted"), ("device-1", None), ("device-2", None)]
    revoke("device-1")
    wait_for(lambda: ("device-1", "revoked") in stage.query(ends), "the task of device-1 to end")
    service.kill()
    assert service.wait(WAIT_S) == -signal.SIGKILL
    revoke("device-2")
    service = serve()
    assert stage.finish(device, "device-0") == 0, stage.log("device-0")
    assert stage.query("select status from runs") == [("finished",)]
    assert stage.query(ends) == [("device-0", "accepted"), ("device-1", "revoked"), ("device-2", "revoked")]
    assert stage.query("select device from tasks where round = 2") == [("device-0",)]
    assert stage.query("select device, reason from refusals order by device") == [
        ("device-1", "its certificate was revoked"), ("device-2", "its certificate was revoked"),
    ]  # fmt: skip
    service.send_signal(signal.SIGTERM)
    assert stage.finish(service, "service") == 130
