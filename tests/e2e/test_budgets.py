"""Devices with budgets in a real run: who cannot keep one stops cleanly, says so, and stays for the next task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_client.speed import find_speed
from fedvit.resources import Budget
from fedvit.wire.messages import Failed, Hello
from tests.e2e.stage import ROUNDS, Stage, wait_for
from tests.unit.edge_client.speeds import some_speed

MB = 10**6


def with_known_speed(stage: Stage, name: str, *arguments: str) -> Any:
    """A device that need not measure first."""
    find_speed(stage.folder / "state" / name, 1, lambda threads: some_speed(threads))
    return stage.device(name, *arguments)


def vault_of(stage: Stage, name: str) -> Path:
    return stage.folder / "state" / name / "vault" / "run" / "CURRENT"


def test_devices_that_cannot_keep_their_budgets(stage: Stage) -> None:
    """device-1 has no time to train, but evaluates; device-2 has not even the memory that the program takes.

    Every task that they cannot do is refused, with the budget and what was measured, and recorded; the rounds close
    with device-0 alone. Nothing of those tasks is kept, and both devices are there until the run ends.
    """
    coordinator = stage.coordinator(broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    slow = observer.find(Failed, device="device-1", kind="train", round=2)
    small = observer.find(Failed, device="device-2", kind="evaluate", round=2)
    devices = {
        "device-0": stage.device("device-0"),
        "device-1": with_known_speed(stage, "device-1", "--round-deadline", "1ms"),
        "device-2": with_known_speed(stage, "device-2", "--memory-budget", "20MB"),
    }
    hello = wait_for(observer.find(Hello, since_start=True, device="device-2"), "the small device")
    assert isinstance(hello, Hello)
    assert hello.profile.budget == Budget(memory_bytes=20 * MB)
    assert hello.profile.speed == some_speed(1)
    failed = wait_for(slow, "the slow device to be stopped in round 2")
    assert isinstance(failed, Failed)
    assert failed.broke == "time"
    assert "the deadline of a round on this device is 1 ms" in failed.reason
    assert failed.use is not None
    assert failed.use.train_s is not None
    failed = wait_for(small, "the small device to be stopped in round 2")
    assert isinstance(failed, Failed)
    assert failed.broke == "memory"
    assert "alone take" in failed.reason
    assert failed.use is not None
    assert (failed.use.peak_rss_bytes or 0) > 20 * MB
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert all(stage.finish(process, name) == 0 for name, process in devices.items())

    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [1] * ROUNDS
    assert [sorted(entry["accuracy"]) for entry in shown["rounds"]] == [["device-0", "device-1"]] * ROUNDS
    budgets = {device["device"]: (device["budget_kept"], device["broke"]) for device in shown["devices"]}
    assert budgets == {
        "device-0": (2 * ROUNDS, {}),
        "device-1": (ROUNDS, {"time": ROUNDS}),
        "device-2": (0, {"memory": 2 * ROUNDS}),
    }
    refused = [(entry["device"], entry["kind"], entry["round"]) for entry in shown["refusals"] if entry["broke"]]
    assert len(set(refused)) == 3 * ROUNDS
    assert vault_of(stage, "device-0").exists()
    assert not vault_of(stage, "device-1").exists()
    assert not vault_of(stage, "device-2").exists()
    assert "Traceback" not in "".join(stage.log(name) for name in ("coordinator", *devices))


def test_a_device_that_has_too_little_memory_to_train(stage: Stage) -> None:
    """It has what the program takes and 2 MB, so the task begins, and is stopped when its tensors and graphs are
    there; every time."""
    coordinator = stage.coordinator()
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    trial = with_known_speed(stage, "device-2", "--memory-budget", "1GB")
    found = wait_for(observer.find(Hello, since_start=True, device="device-2"), "the device's own memory")
    assert isinstance(found, Hello)
    base_bytes = found.profile.base_rss_bytes
    assert base_bytes is not None
    trial.terminate()
    assert stage.finish(trial, "device-2") == 0
    failed: Callable[[], Any] = observer.find(Failed, device="device-2", kind="train")
    others = [stage.device(name) for name in ("device-0", "device-1")]
    tight = with_known_speed(stage, "device-2", "--memory-budget", str(base_bytes + 2 * MB))
    message = wait_for(failed, "the device to be stopped")
    assert isinstance(message, Failed)
    assert message.broke == "memory"
    assert "resident memory reached" in message.reason
    assert message.use is not None
    assert (message.use.peak_rss_bytes or 0) > base_bytes + 2 * MB
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert [stage.finish(process, "device") for process in (*others, tight)] == [0, 0, 0]
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [2] * ROUNDS
    [device] = [entry for entry in shown["devices"] if entry["device"] == "device-2"]
    assert device["broke"]["memory"] >= ROUNDS
