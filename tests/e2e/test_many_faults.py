"""A device that dies at every task, a second coordinator, and a hundred devices where few files may be open."""

import time
from typing import Any

import pytest

from fedvit.wire.messages import Task
from tests.support.brokers import mosquitto
from tests.support.programs import CONFIG, DEVICES, WAIT_S, Stage, program, toml, wait_for

pytestmark = pytest.mark.slow

BRIEF: dict[str, Any] = {**CONFIG, "rounds": 1, "variants": {}}
"""Short tasks; what concerns deadlines is at its defaults."""
for key in ("deadline_s", "rejoin_grace_s"):
    del BRIEF[key]
MANY = 100
FEW_FILES = 64


def test_device_that_dies_at_every_task_holds_no_round(stage: Stage) -> None:
    """Two seconds into each of them it is killed, and started again at once, as by systemd. Its round closes with the
    others' results, by attempts and not by a deadline, which would be hours away."""
    # the one that dies would take long enough to be killed on any processor
    values = {**BRIEF, "devices": len(DEVICES), "variants": {"device-1": {"epochs": 100_000}}}
    coordinator = stage.coordinator(values=values)
    good = {name: stage.device(name) for name in DEVICES if name != "device-1"}
    unlucky = stage.device("device-1")
    deaths, given_up = 0, "its process ended 3 times at this task"
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    told = stage.observer().find(Task, since_start=True, device="device-1")
    until = time.monotonic() + WAIT_S
    while given_up not in stage.log("coordinator") and time.monotonic() < until:
        if told():
            time.sleep(2.0)  # it is well into its task
            unlucky.kill()
            unlucky.wait()
            deaths += 1
            unlucky = stage.device("device-1")
        time.sleep(0.05)
    assert given_up in stage.log("coordinator"), stage.log("coordinator")
    assert deaths == 3
    stage.finish_run(coordinator, good)
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [2]
    assert sorted(shown["rounds"][0]["accuracy"]) == ["device-0", "device-2"]
    [refusal] = shown["refusals"]
    assert (refusal["device"], refusal["lost"]) == ("device-1", True)


def test_second_coordinator_on_the_same_broker_ends_and_names_the_first(stage: Stage) -> None:
    """It leaves no run behind, and the first run ends with all its results."""
    with mosquitto(stage.folder / "broker") as broker:
        address = f"mqtt://127.0.0.1:{broker.address.port}"
        stage.port = broker.address.port
        first = stage.coordinator(broker=address)
        devices = {name: stage.device(name) for name in DEVICES}
        wait_for(lambda: stage.query("select 1 from results where round = 1"), "a result of round 1")
        elsewhere = stage.folder / "elsewhere"
        config = stage.folder / "second.toml"
        config.write_text(toml({**BRIEF, "devices": 1}))
        given = ["--config", str(config), "--run", "second", "--runs", str(elsewhere), "--broker", address]
        second = stage.fork("second", "start", *given)
        assert second.wait(WAIT_S) == 2, stage.log("second")
        assert "federation 'home' is served by another coordinator: run 'run' on " in stage.log("second")
        assert not (elsewhere / "second").exists(), "it leaves nothing behind"
        wait_for(lambda: "another coordinator (run 'second' on " in stage.log("coordinator"), "the first to name it")
        stage.finish_run(first, devices)
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [3] * CONFIG["rounds"]
    assert shown["refusals"] == []


def test_coordinator_with_few_open_files_serves_a_hundred_devices(stage: Stage) -> None:
    with mosquitto(stage.folder / "broker") as broker:
        address = f"127.0.0.1:{broker.address.port}"
        config = stage.folder / "many.toml"
        # prompts are made for each device, and each sends some back
        values = {**BRIEF, "method": "pfedpg", "options": {"steps": 1, "batch_size": 8, "tokens": 4}, "rounds": 2}
        config.write_text(toml({**values, "devices": MANY, "evaluate_every": 2}))
        given = ["start", "--config", str(config), "--run", "run", "--runs", str(stage.out)]
        given += ["--broker", f"mqtt://{address}"]
        limited = ["prlimit", f"--nofile={FEW_FILES}:{FEW_FILES}", *program("coordinator.cli"), *given]
        coordinator = stage.start("coordinator", limited)
        arguments = ["--broker", address, "--parts", str(stage.parts), "--devices", str(MANY)]
        arguments += ["--state", str(stage.folder / "state"), "--once"]
        host = stage.start("host", [*program("fleet.commands.host"), *arguments])
        assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
        assert stage.finish(host, "host") == 0, stage.log("host")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [MANY] * 2
    assert len(shown["rounds"][-1]["accuracy"]) == MANY
