"""The coordinator's two processes: either may be killed, and the one that devices talk to has no torch."""

import os
import random
import re
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from coordinator.config import make_config
from coordinator.record.record import open_record
from tests.support.programs import CONFIG, DEVICES, ROUNDS, Stage, find_worker, is_running, program, wait_for
from tests.support.waiting import WAIT_S

MOST_RSS_BYTES = 200e6
"""Of a coordinator that waits; docs/architecture.md has what was measured."""
SEED = 7
LONGEST_WAIT_S = 0.3


def test_a_coordinator_that_waits_for_devices_has_no_torch(stage: Stage) -> None:
    """As it is started by an operator. Its worker process is there already, and ends with it, by Ctrl-C."""
    with open_record(stage.out) as store:
        store.runs.create("run", msgspec.to_builtins(make_config({**CONFIG, "devices": 1}, "test").run))
    given = ["start", "--runs", str(stage.out), "--broker", "embedded", "--broker.port", str(stage.port), "--resume"]
    coordinator = stage.start("coordinator", [*program("coordinator.cli"), *given])
    wait_for(lambda: "waiting for 1 device" in stage.log("coordinator"), "the coordinator to wait")
    maps = Path(f"/proc/{coordinator.pid}/maps").read_text()
    assert not re.findall(r"/(torch|timm|onnx|onnxruntime)/", maps)
    assert psutil.Process(coordinator.pid).memory_info().rss < MOST_RSS_BYTES
    worker = psutil.Process(wait_for(lambda: find_worker(stage.out / "run"), "the worker process"))
    assert "coordinator.compute.worker" in worker.cmdline()
    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, "coordinator") == 130
    assert "--resume run" in stage.log("coordinator")
    assert stage.query("select status from runs") == [("interrupted",)]
    worker.wait(WAIT_S)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_numbers_stay_the_same(
    stage: Stage, undisturbed: bytes
) -> None:
    """kill -9 of the worker while it prepares, and about the server steps of two rounds; then of the coordinator, with
    its worker alive: that ends by itself."""
    draw = random.Random(SEED)
    coordinator = stage.coordinator()
    run = stage.out / "run"
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "the run has 10 classes" in stage.log("coordinator"), "the run to be prepared")
    killed = [_kill_worker(run)]
    for number in (1, 2):
        brought = f"select count(*) from results where round = {number} and kind = 'train'"
        wait_for(lambda: stage.query(brought) == [(len(DEVICES),)], f"results of round {number}")  # noqa: B023
        time.sleep(draw.uniform(0, LONGEST_WAIT_S))
        wait_for(lambda: find_worker(run) not in killed, "the worker to be started again")
        killed.append(_kill_worker(run))
    wait_for(lambda: stage.query("select 1 from results where round = 3 and kind = 'train'"), "a result of round 3")
    wait_for(lambda: find_worker(run) not in killed, "the worker to be started again")
    left = find_worker(run)
    assert left is not None
    coordinator.kill()
    coordinator.wait()
    wait_for(lambda: not is_running(left), "the worker to end by itself")
    assert stage.log("coordinator").count("worker process ended with signal 9 (SIGKILL)") == len(killed)
    stage.finish_run(stage.coordinator(resume=True), devices)
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [len(DEVICES)] * ROUNDS
    assert stage.model() == undisturbed


def _kill_worker(run: Path) -> int:
    pid = find_worker(run)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid
