"""Devices that stand still or have no time, as real processes: rounds end without them, late results count."""

import json
import signal
import subprocess
from typing import Any

from coordinator.rounds.status import read_status
from fedvit.wire.messages import Progress, Task
from tests.support.programs import DEVICES, Stage, program, wait_for


def test_a_stopped_device_is_late_and_a_busy_one_declines(stage: Stage) -> None:
    """device-1 stands still from round 1 on, and the owner of device-2 needs it from then on.

    `coordinator status` names both. When device-1 goes on, its result counts in round 3.
    """
    in_use = stage.folder / "in-use"
    coordinator = stage.coordinator("--quorum", "0.5", "--late", "use", "--evaluate-every", "3")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    devices = {name: stage.device(name) for name in DEVICES[:2]}
    devices["device-2"] = stage.device("device-2", "--busy-file", str(in_use))

    wait_for(observer.find(Progress, since_start=True, round=1, device="device-1"), "device-1 to train in round 1")
    devices["device-1"].send_signal(signal.SIGSTOP)
    wait_for(observer.find(Progress, since_start=True, round=1, device="device-2"), "device-2 to train in round 1")
    in_use.touch()
    wait_for(observer.find(Task, since_start=True, round=3, device="device-0"), "device-0 to be asked in round 3")
    devices["device-0"].send_signal(signal.SIGSTOP)  # before it is through, which takes it seconds

    def all_are_named() -> bool:
        now = read_status(stage.out / "run")  # written once a second: for a while it says what was so in round 2
        waiting = {one.device: one.round for one in now.waiting_for}
        return waiting == {"device-0": 3, "device-1": 1} and bool(now.backing_off) and now.doing == "round 3/3: train"

    wait_for(all_are_named, "the status to name them")
    command = [*program("coordinator.cli"), "status", "run", "--runs", str(stage.out), "--json"]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (told["run"], told["status"], told["doing"], told["stale"]) == ("run", "running", "round 3/3: train", False)
    assert {one["device"]: one["round"] for one in told["waiting_for"]} == {"device-0": 3, "device-1": 1}
    [resting] = told["resting"]
    assert resting["device"] == "device-2"
    assert str(in_use) in resting["reason"]

    devices["device-1"].send_signal(signal.SIGCONT)
    wait_for(lambda: stage.query("select 1 from results where device = 'device-1'"), "the late result")
    devices["device-0"].send_signal(signal.SIGCONT)
    stage.finish_run(coordinator, devices)
    counted = stage.query("select device, round, used_in from results where kind = 'train' order by round, device")
    assert ("device-1", 1, 3) in counted
    assert [row for row in counted if row[0] == "device-2"] == [("device-2", 1, 1)]
    declined = [entry for entry in stage.show()["refusals"] if entry["kind"] == "declined"]
    assert {entry["device"] for entry in declined} == {"device-2"}
    assert declined[0]["round"] == 2  # and again in a round that begins more than a minute later
