"""A second coordinator, and a hundred devices where few files may be open."""

from typing import Any

import pytest

from tests.support.brokers import mosquitto
from tests.support.programs import CONFIG, DEVICES, WAIT_S, Stage, program, toml, wait_for

pytestmark = pytest.mark.slow

BRIEF: dict[str, Any] = {**CONFIG, "rounds": 1, "variants": {}}
"""Short tasks; what concerns deadlines is at its defaults."""
for key in ("deadline_s", "rejoin_grace_s"):
    del BRIEF[key]
MANY = 100
FEW_FILES = 64


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
