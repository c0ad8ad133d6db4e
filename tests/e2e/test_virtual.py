"""`fleet run --virtual`: many devices in few processes, over a real broker, through the death of a process."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.security.broker.process import PICKED_PORTS
from fleet.devices import virtual_devices
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.forked import Forked
from tests.support.programs import CONFIG, DEEP_LEARNING, WAIT_S, Stage, open_to_others, toml, wait_for

DEVICES = 40
VALUES: dict[str, Any] = {
    "method": "pfedpg",  # personal heads in vaults, prompts for each device, an upload from each
    "rounds": 2,
    "evaluate_every": 2,
    "seed": 5,
    "options": {"steps": 2, "batch_size": 8, "tokens": 4},
    "model_options": CONFIG["model_options"],
    "rejoin_grace_s": 60.0,
}


def hosts(folder: Path) -> dict[str, int]:
    """Processes of virtual devices of a run, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(folder / "state") in words and "--number" in words:
            found[words[words.index("--number") + 1]] = int(path.parent.name)
    return found


@pytest.mark.slow
def test_a_killed_host_comes_back_and_changes_no_bit(stage: Stage, graph_cache: Path) -> None:
    """40 devices in two processes, one of which is killed in a round: the tensors are those of the run in memory.

    No port is given: a free one is taken, as the usual one may belong to another program.
    """
    config = stage.folder / "run.toml"
    config.write_text(toml(VALUES))
    arguments = ["run", "--virtual", str(DEVICES), "--hosts", "2", "--parts", str(stage.parts), "--run", "run"]
    arguments += ["--runs", str(stage.out), "--broker", "mosquitto", "--config", str(config), "--json"]
    fleet = Forked("fleet.cli", arguments, stage.log_path("fleet"), stage.environment)
    try:
        wait_for(lambda: sorted(hosts(stage.out / "run")) == ["0", "1"], "two processes of devices")
        first = hosts(stage.out / "run")
        wait_for(lambda: stage.query("select 1 from results where round = 1 limit 1"), "a result of round 1")
        for pid in first.values():  # as light as devices
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert not [library for library in DEEP_LEARNING if f"/{library}" in maps]
        os.kill(first["1"], signal.SIGKILL)
        wait_for(lambda: hosts(stage.out / "run").get("1") not in (None, first["1"]), "the host to be started again")
        assert stage.finish(fleet, "fleet") == 0, stage.log("fleet")
    finally:
        fleet.send_signal(signal.SIGTERM)
        fleet.wait(WAIT_S)
    [[broker]] = stage.query("select broker from runs")
    assert json.loads(broker)["port"] in PICKED_PORTS
    outcome = json.loads(stage.log("fleet").strip().splitlines()[-1])
    assert outcome["run"] == "run"
    said = "".join(log.read_text() for log in (stage.out / "run" / "devices").iterdir())
    assert said.count("run ended") == DEVICES  # all heard of it, and left by themselves
    assert open_to_others(stage.out) == []
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [DEVICES] * 2
    assert len(shown["rounds"][-1]["accuracy"]) == DEVICES

    devices = virtual_devices(stage.parts, DEVICES)
    calm = simulate(RunRequest(devices, VALUES, out=stage.folder / "calm", run="calm", graph_cache=graph_cache))
    assert stage.model() == (calm.folder / "model.safetensors").read_bytes()
    assert open_to_others(calm.folder) == []
    generated = sorted((calm.folder / "generated").iterdir())
    assert len(generated) == DEVICES
    for file in generated:
        assert (stage.out / "run" / "generated" / file.name).read_bytes() == file.read_bytes(), file.name
