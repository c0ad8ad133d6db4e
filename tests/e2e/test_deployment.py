"""A deployment from nothing: made, joined by token, trained over mutual TLS, and one device revoked in mid-run."""

import json
import signal
from pathlib import Path

from coordinator.broker.process import claim_port
from tests.support.programs import ROUNDS, Stage, program, said, wait_for


def test_join_train_and_revoke(stage: Stage) -> None:
    """device-1 trains so long that it is revoked while it does. It is cut off and stays out; the round closes without
    it at once, not at its deadline, and the run goes on with device-0."""
    folder = str(stage.folder / "deployment")
    ports = [str(claim_port()) for _ in range(2)]
    said(
        stage, "coordinator.cli", "init", folder, "--listen", "127.0.0.1", "--host", "localhost",
        "--port", ports[0], "--enrolment-port", ports[1], "--federation", "fleet-7",
    )  # fmt: skip
    given = ["--devices", "2", "--broker.deployment", folder, "--variant", "device-1:epochs=3000"]
    coordinator = stage.coordinator(*given, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    devices = {}
    for name in ("device-0", "device-1"):
        token = said(stage, "coordinator.cli", "enroll", name, "--deployment", folder, "--no-wait").split()[-1]
        state = str(stage.folder / "state" / name)
        said(stage, "edge_client.cli", "join", token, "--state", state)
        command = [*program("edge_client.cli"), "--data", str(stage.parts / name), "--state", state]
        devices[name] = stage.start(name, [*command, "--threads", "1", "--once"])
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
    listed = json.loads(said(stage, "coordinator.cli", "devices", "--deployment", folder, "--json"))
    assert {entry["device"]: entry["state"] for entry in listed} == {"device-0": "valid", "device-1": "revoked"}
    assert devices["device-1"].poll() is None  # it goes on trying; its owner decides
    key = (stage.folder / "state" / "device-0" / "identity" / "key.pem").read_bytes()
    for file in Path(folder).rglob("*"):
        assert not file.is_file() or key not in file.read_bytes()
    assert "Traceback" not in "".join(stage.log(name) for name in ("coordinator", *devices))
