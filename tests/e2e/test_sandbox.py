"""The processes that run graphs, killed at work: the run goes on, and its numbers stay the same."""

import os
import signal

import psutil

from fedvit.wire.messages import Progress
from tests.support.programs import DEVICES, ROUNDS, WAIT_S, Stage, wait_for


def test_results_come_once_whatever_is_killed(stage: Stage, undisturbed: bytes) -> None:
    """kill -9 of the process at work in round 1, of what forks it in round 2, of the whole device in round 3."""
    coordinator = stage.coordinator(broker="mosquitto")
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    for number, name in enumerate(("device-0", "device-1", "device-2"), start=1):
        wait_for(observer.find(Progress, since_start=True, round=number, kind="train", device=name), f"round {number}")
        launcher, *workers = psutil.Process(devices[name].pid).children(recursive=True)
        if number < 3:
            os.kill(launcher.pid if number == 2 else workers[0].pid, signal.SIGKILL)
            continue
        devices[name].kill()
        psutil.wait_procs([launcher, *workers], timeout=WAIT_S)
        assert not any(one.is_running() for one in (launcher, *workers)), "they end with the device"
        devices[name] = stage.device(name)
    stage.finish_run(coordinator, devices)
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [3] * ROUNDS
    assert not stage.show()["refusals"]
    assert stage.model() == undisturbed
