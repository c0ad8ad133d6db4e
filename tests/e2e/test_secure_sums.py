"""Secure sums with real processes: the sum is that of a plain run, also after kills, and nobody sends an update."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedvit.tensors import map_tensors
from fedvit.wire.messages import (
    BlobAck,
    Hello,
    Result,
    SumAsk,
    SumId,
    SumKeys,
    SumMasked,
    SumReveal,
    SumShares,
    SumSigned,
)
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.e2e.test_deployment import make_deployment
from tests.support.federation import deal_digits
from tests.support.forked import Forked
from tests.support.programs import SUMMED, Observer, Stage, program, said, wait_for

STOP, GO_ON = signal.SIGSTOP, signal.SIGCONT
NAMES = [f"device-{number}" for number in range(4)]
VALUES: dict[str, Any] = {**SUMMED, "devices": len(NAMES)}


@pytest.fixture
def four(stage: Stage, tmp_path: Path) -> Stage:
    deal_digits(stage.folder / "four", NAMES)
    stage.parts = stage.folder / "four"
    return stage


def _list_metrics(stage: Stage, kind: str) -> list[dict[str, float]]:
    rows = stage.query(f"select metrics from results where device = '(sum)' and kind = '{kind}' order by round")
    return [json.loads(row[0]) for row in rows]


def _signal(devices: "dict[str, subprocess.Popen[bytes]]", number: int, *names: str) -> None:
    for name in names:
        devices[name].send_signal(number)


def _stop_before_the_sum(
    stage: Stage, observer: Observer, devices: "dict[str, subprocess.Popen[bytes]]", number: int
) -> None:
    """Stop device-0 a moment before the sum of a round's training begins, since a device that is stopped for long is
    not invited.

    The run is paused before this round. Device-1 is stopped before it has a task, which holds its result back.
    """
    wait_for(lambda: f"paused by the operator before round {number};" in stage.log("coordinator"), "the pause")
    for name in sorted(devices):
        wait_for(observer.find(Hello, since_start=True, device=name), f"the hello of {name}")
    _signal(devices, STOP, "device-1")
    stage.command("unpause", "run", "--runs", str(stage.out))
    for name in sorted(devices.keys() - {"device-1"}):
        result = observer.find(Result, since_start=True, device=name, round=number, kind="train")
        wait_for(result, f"the result of {name}")
    _signal(devices, STOP, "device-0")
    _signal(devices, GO_ON, "device-1")


def _go_to_the_reveals(observer: Observer, devices: "dict[str, subprocess.Popen[bytes]]", round_: int) -> None:
    """Go on until the coordinator waits for reveals; device-0 is stopped and has a result.

    While some devices run, the others are stopped, so that the step after their next answer waits for these. In the end
    device-2 and device-3 are.
    """
    first, pair = ["device-0"], ["device-2", "device-3"]
    for running, stopped, kind in (
        (first, pair, SumKeys),
        (pair, first, SumShares),
        (first, pair, SumMasked),
        (pair, first, SumSigned),
        (first, pair, SumReveal),
    ):
        _signal(devices, STOP, *stopped)
        _signal(devices, GO_ON, *running)
        for name in running:
            find = observer.find(kind, since_start=True, device=name, sum=SumId("run", round_, "train", 1))
            answer = wait_for(find, f"{kind.__name__} of {name}")
            if isinstance(answer, SumMasked) and not answer.inline:  # it is fetched from the device, which must run
                fetched = observer.find(BlobAck, since_start=True, device=name, digest=answer.vector.digest)
                wait_for(fetched, f"the masked result of {name}")


def _kill_at_the_reveals(
    stage: Stage, observer: Observer, coordinator: Forked, devices: "dict[str, subprocess.Popen[bytes]]"
) -> None:
    """Kill the coordinator while it waits for reveals in round 1."""
    _go_to_the_reveals(observer, devices, 1)
    assert not stage.query("select 1 from results where device = '(sum)'")
    coordinator.kill()
    coordinator.wait()
    _signal(devices, GO_ON, "device-2", "device-3")


def _kill_broker(
    stage: Stage, observer: Observer, coordinator: Forked, devices: "dict[str, subprocess.Popen[bytes]]"
) -> None:
    """Kill the coordinator's broker, and let stopped devices go on; wait until all have joined again."""
    joined = {name: stage.log("coordinator").count(f"{name} joined") for name in devices}
    [broker] = [child for child in psutil.Process(coordinator.pid).children() if child.name() == "mosquitto"]
    broker.kill()
    _signal(devices, GO_ON, *devices)
    for name, times in joined.items():
        wait_for(lambda name=name, times=times: stage.log("coordinator").count(f"{name} joined") > times, name)
    observer.wait()


def _pause(stage: Stage) -> None:
    stage.command("pause", "run", "--runs", str(stage.out))


def _pause_before_devices_join(stage: Stage) -> None:
    """Pause a run as soon as it is in the record, which is a moment after its broker has started."""
    wait_for(lambda: "waiting for 4 devices" in stage.log("coordinator"), "the run")
    _pause(stage)


@pytest.mark.slow
def test_sum_is_that_of_a_plain_run_though_the_coordinator_is_killed(four: Stage) -> None:
    """kill -9 of the coordinator while it waits for reveals, and in the next round while it waits for keys."""
    stage = four
    coordinator = stage.coordinator(values={**VALUES, "secure": True}, broker="mosquitto")
    _pause_before_devices_join(stage)
    observer = stage.observer()
    devices = {name: stage.device(name) for name in NAMES}
    _stop_before_the_sum(stage, observer, devices, 1)
    _kill_at_the_reveals(stage, observer, coordinator, devices)
    _pause(stage)
    coordinator = stage.coordinator(broker="mosquitto", resume=True)

    _stop_before_the_sum(stage, observer, devices, 2)
    invited = SumId("run", 2, "train", 1)
    wait_for(observer.find(SumKeys, since_start=True, device="device-1", sum=invited), "keys of device-1")
    coordinator.kill()
    coordinator.wait()
    _signal(devices, GO_ON, "device-0")
    coordinator = stage.coordinator(broker="mosquitto", resume=True)
    stage.finish_run(coordinator, devices)

    assert "round 1: the secure sum continues" in stage.log("coordinator")
    asked = {message.sum for message in observer.messages() if isinstance(message, SumAsk)}
    assert {(sum_id.round, sum_id.attempt) for sum_id in asked if sum_id.kind == "train"} == {(1, 1), (2, 2)}
    assert [metrics["devices"] for metrics in _list_metrics(stage, "train")] == [4.0, 4.0]
    assert [metrics["devices"] for metrics in _list_metrics(stage, "evaluate")] == [4.0, 4.0]
    results = [message for message in observer.messages() if isinstance(message, Result)]
    assert len(results) >= 16
    assert not any(result.upload or result.metrics or result.samples for result in results)
    secure = dict(map_tensors(stage.out / "run" / "model.safetensors"))
    bound = _list_metrics(stage, "train")[0]["error_bound"]
    shown = stage.show()["rounds"]

    stage.out = stage.folder / "plain"
    plain_run = stage.coordinator(values=VALUES, broker="mosquitto")
    stage.finish_run(plain_run, {name: stage.device(name, "--state", str(stage.folder / name)) for name in NAMES})
    plain = map_tensors(stage.out / "run" / "model.safetensors")
    assert bound < 1e-6
    assert all(np.allclose(secure[name], plain[name], atol=1e-4) for name in plain)
    for one, other in zip(shown, stage.show()["rounds"], strict=True):
        assert one["accepted"] == other["accepted"] == 4
        assert one["accuracy_weighted"] == other["accuracy_weighted"]


@pytest.mark.slow
def test_sum_goes_on_though_the_broker_is_killed(four: Stage, graph_cache: Path) -> None:
    """kill -9 of the broker while the coordinator waits for keys in round 1, and for reveals in round 2."""
    stage, values = four, {**VALUES, "secure": True, "rounds": 3}
    coordinator = stage.coordinator(values=values, broker="mosquitto")
    _pause_before_devices_join(stage)
    observer = stage.observer()
    devices = {name: stage.device(name) for name in NAMES}
    _stop_before_the_sum(stage, observer, devices, 1)
    invited = SumId("run", 1, "train", 1)
    wait_for(observer.find(SumKeys, since_start=True, device="device-1", sum=invited), "keys of device-1")
    _pause(stage)
    _kill_broker(stage, observer, coordinator, devices)

    _stop_before_the_sum(stage, observer, devices, 2)
    _go_to_the_reveals(observer, devices, 2)
    _pause(stage)  # so that the run does not end, with its broker, while a device is on its way back
    _kill_broker(stage, observer, coordinator, devices)
    stage.command("unpause", "run", "--runs", str(stage.out))
    stage.finish_run(coordinator, devices)
    assert [metrics["devices"] for metrics in _list_metrics(stage, "train")] == [4.0, 4.0, 4.0]
    assert [metrics["attempt"] for metrics in _list_metrics(stage, "train")] == [1.0, 1.0, 1.0]

    folders = [stage.parts / name for name in NAMES]
    request = RunRequest(folders, values, out=stage.folder / "calm", run="calm", graph_cache=graph_cache)
    assert stage.model() == (simulate(request).folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_device_that_is_killed_in_the_sum_does_not_stop_it(four: Stage) -> None:
    """With certificates, and owners that allow updates inside sums only. It returns, and answers from its vault."""
    stage = four
    folder = make_deployment(stage)
    state = {name: ["--state", str(stage.folder / "state" / name)] for name in NAMES}
    flags = ["--broker.deployment", folder]
    values = {**VALUES, "secure": True}
    coordinator = stage.coordinator(*flags, values=values, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    for name in NAMES:
        token = said(stage, "coordinator.cli", "enroll", name, "--deployment", folder, "--no-wait").split()[-1]
        said(stage, "edge_client.cli", "join", token, *state[name])

    def start(name: str) -> "subprocess.Popen[bytes]":
        command = [*program("edge_client.cli"), "--data", str(stage.parts / name), *state[name]]
        return stage.start(name, [*command, "--threads", "1", "--once", "--updates", "sum"])

    devices = {name: start(name) for name in NAMES}
    wait_for(lambda: "task done" in stage.log("device-3"), "the first result of device-3")
    devices["device-3"].kill()
    devices["device-3"].wait()
    devices["device-3"] = start("device-3")
    stage.finish_run(coordinator, devices)
    for kind in ("train", "evaluate"):
        assert [metrics["devices"] for metrics in _list_metrics(stage, kind)] in ([3.0, 4.0], [4.0, 4.0])
    lines = json.loads(said(stage, "edge_client.cli", "ledger", *state["device-0"], "--json"))
    assert {line["what"] for line in lines if line.get("form") == "sum"} <= {
        f"inside a sum of {count} devices" for count in (3, 4)
    }
    assert not [line for line in lines if line.get("form") == "single"]
    assert "in sums of devices" in said(stage, "edge_client.cli", "status", *state["device-0"])


@pytest.mark.slow
def test_private_run_ends_with_an_epsilon(four: Stage) -> None:
    """Devices add the noise inside the sum, and epsilon is that of the sum that was made."""
    stage = four
    private = {"noise_multiplier": 0.5, "clip": 1.0, "delta": 1e-3}
    coordinator = stage.coordinator(values={**VALUES, "secure": True, "privacy": private}, broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    stage.finish_run(coordinator, {name: stage.device(name) for name in NAMES})
    rounds = stage.report()["rounds"]
    spent = [entry["epsilon"] for entry in rounds]
    assert 0 < spent[0] < spent[1]
    sums = [entry["sum"] for entry in rounds]
    assert [added["devices"] for added in sums] == [4, 4]
    # noise is sized for three devices, the fewest that can make a sum of four, and four have added it
    assert [added["noise_multiplier"] for added in sums] == pytest.approx([0.5 * (4 / 3) ** 0.5] * 2)
    assert f"epsilon {spent[1]:.3g}" in said(stage, "coordinator.cli", "show", "run", "--runs", str(stage.out))
