"""A server that trains in two processes: any of them may be killed, and none is left behind."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.compute import ranks
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.forked import ForkedRank
from tests.support.programs import CONFIG, DEVICES, Stage, find_worker, is_running, wait_for

pytestmark = pytest.mark.slow

ACCELERATOR = ("--accelerator", "cpu:2")
RUN: dict[str, Any] = {
    **CONFIG,
    "rounds": 2,
    "devices": len(DEVICES),
    "variants": {},
    "options": {**CONFIG["options"], "server_epochs": 4, "server_batch_size": 8},
}


def test_processes_of_the_servers_training_may_be_killed_and_the_numbers_stay_the_same(
    stage: Stage, parts: Path, graph_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of one of them when all results of a round are here; of the worker process, whose processes then end by
    themselves; and of the coordinator, with which all end."""
    run = stage.out / "run"
    first = stage.coordinator(*ACCELERATOR, values=RUN)
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for_results(stage, 1, len(DEVICES))
    begun = training(run)
    os.kill(begun[1], signal.SIGKILL)  # as it trains, or before it does
    wait_for(lambda: training(run) != begun, "other processes to train")
    named = "rank 1 of 2 of the server's training (cpu, process"
    wait_for(lambda: named in stage.log("coordinator"), "the log to name the process")
    wait_for_results(stage, 2, 1)
    second = training(run)
    worker = find_worker(run)
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, second)), "the processes of a dead worker to end")
    wait_for(lambda: training(run) != second, "those of another worker")
    third = training(run)
    first.kill()
    first.wait()
    wait_for(lambda: not any(map(is_running, third)), "the processes of a dead coordinator to end")
    stage.finish_run(stage.coordinator(*ACCELERATOR, resume=True), devices)
    wait_for(lambda: not any(map(is_running, training(run))), "the processes of a run that is over to end")

    monkeypatch.setattr(ranks, "spawn", ForkedRank)
    values = {**{key: value for key, value in RUN.items() if key != "devices"}, "accelerator": "cpu:2"}
    simulate(RunRequest([parts / name for name in DEVICES], values, out=tmp_path, run="calm", graph_cache=graph_cache))
    assert stage.model() == (tmp_path / "calm" / "model.safetensors").read_bytes()


def wait_for_results(stage: Stage, number: int, devices: int) -> None:
    brought = f"select 1 from results where round = {number} and kind = 'train'"
    wait_for(lambda: len(stage.query(brought)) >= devices, f"results of round {number}")


def training(run: Path) -> list[int]:
    """The newest processes of the server's training, as the run's log says."""
    said = re.findall(r"server training .*pids='\[(\d+), (\d+)\]'", (run / "coordinator.log").read_text())
    return [int(pid) for pid in said[-1]]
