"""Devices with budgets in a real run: planned for, stopped when a plan was wrong, refused when nothing fits."""

from pathlib import Path
from typing import Any

import pytest

from edge_client.owner.speed import find_speed
from fedvit.errors import PeerRefused
from fedvit.resources import Budget, ProductRate, Speed
from fedvit.wire.messages import Failed, Hello
from tests.support.programs import Stage, wait_for
from tests.support.speeds import some_speed

MB = 10**6


def with_known_speed(stage: Stage, name: str, *arguments: str) -> Any:
    """A device that need not measure first."""
    find_speed(stage.folder / "state" / name, 1, lambda threads: some_speed(threads))
    return stage.device(name, *arguments)


def vault_of(stage: Stage, name: str) -> Path:
    return stage.folder / "state" / name / "vault" / "run" / "CURRENT"


@pytest.mark.slow
def test_devices_without_a_fitting_plan_get_the_reason(stage: Stage) -> None:
    """device-1 has no time to train, device-2 not even the memory that the program takes: both leave with what would be
    needed, and the round closes with device-0 alone."""
    coordinator = stage.coordinator("--rounds", "1", broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    devices = {
        "device-0": stage.device("device-0"),
        "device-1": with_known_speed(stage, "device-1", "--round-deadline", "1ms"),
        "device-2": with_known_speed(stage, "device-2", "--memory-budget", "20MB"),
    }
    hello = wait_for(observer.find(Hello, since_start=True, device="device-2"), "the small device")
    assert isinstance(hello, Hello)
    assert hello.profile.budget == Budget(memory_bytes=20 * MB)
    assert hello.profile.speed == some_speed(1)
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert {name: stage.finish(process, name) for name, process in devices.items()} == {
        "device-0": 0, "device-1": PeerRefused.exit_code, "device-2": PeerRefused.exit_code,
    }  # fmt: skip
    assert "its round deadline is 1 ms, at least" in stage.log("device-1")
    assert "its memory budget is 20 MB, at least" in stage.log("device-2")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [1]
    assert {(entry["device"], entry["kind"]) for entry in shown["refusals"]} == {
        ("device-1", "plan"), ("device-2", "plan"),
    }  # fmt: skip
    assert vault_of(stage, "device-0").exists()
    assert not vault_of(stage, "device-1").exists()
    assert "Traceback" not in "".join(stage.log(name) for name in ("coordinator", *devices))


@pytest.mark.slow
def test_device_that_is_slower_than_its_profile(stage: Stage) -> None:
    """Its plan fits by the speed that it claims. It stops at its deadline, keeps nothing, and says what it measured;
    the coordinator then knows better, and in round 2 nothing fits it."""
    coordinator = stage.coordinator(broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    stopped = observer.find(Failed, device="device-1", kind="train")
    claimed = Speed(
        threads=1, products=(ProductRate("weights", 1, 64, 192, 768, 1e18),), bytes_per_s={"Add": 1e18}, node_s=1e-12
    )
    find_speed(stage.folder / "state" / "device-1", 1, lambda threads: claimed)
    others = [stage.device(name) for name in ("device-0", "device-2")]
    slow = stage.device("device-1", "--round-deadline", "30ms")
    failed = wait_for(stopped, "the slow device to be stopped")
    assert isinstance(failed, Failed)
    assert failed.broke == "time"
    assert "the deadline of a round on this device is 30 ms" in failed.reason
    assert failed.use is not None
    assert (failed.use.train_s or 0) >= 0.03
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(slow, "device-1") in (0, PeerRefused.exit_code)
    assert [stage.finish(process, "device") for process in others] == [0, 0]
    shown = stage.show()
    [device] = [entry for entry in shown["devices"] if entry["device"] == "device-1"]
    assert device["broke"]["time"] >= 1
    assert not vault_of(stage, "device-1").exists()


@pytest.mark.slow
def test_a_device_gets_what_fits_its_memory(stage: Stage) -> None:
    """Two devices of one run: without a budget the method as it was asked for, and with one a smaller form, which then
    needs no more than that. All take part."""
    larger = ("width=128", "patch_size=4")
    asked = [word for option in larger for word in ("--model-option", option)]
    asked += ["--rounds", "1", "-o", "batch_size=96", "-o", "micro_batch=96", "-o", "epochs=1"]
    asked += ["--variant", "device-1:epochs=1"]
    coordinator = stage.coordinator(*asked, broker="mosquitto")
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    devices = [stage.device("device-0"), stage.device("device-2")]
    tight = with_known_speed(stage, "device-1", "--memory-budget", "150MB")
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    ended = [stage.finish(process, "device") for process in (*devices, tight)]
    assert ended == [0, 0, 0], stage.log("device-1")
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [3]
    [device] = [entry for entry in shown["devices"] if entry["device"] == "device-1"]
    assert device["broke"] == {}
    assert device["peak_rss_bytes"] <= 150 * MB
    [free] = [entry for entry in shown["devices"] if entry["device"] == "device-0"]
    assert free["peak_rss_bytes"] > 150 * MB
    report = stage.report()
    changed = {entry["device"]: entry["rounds"][0]["expected"]["changes"] for entry in report["devices"]}
    assert changed["device-0"] == {}
    assert changed["device-1"]["micro_batch"] < 96
