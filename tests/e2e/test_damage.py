"""A memory card flips bits of a device in the middle of a run: real processes, real files."""

import pytest

from fedvit.wire.messages import Progress
from tests.support.damage import flip
from tests.support.programs import DEVICES, ROUNDS, Stage, wait_for


@pytest.mark.slow
def test_damaged_blobs_are_fetched_again_and_results_are_the_same(stage: Stage, undisturbed: bytes) -> None:
    """kill -9 in round 2, then a bit of each blob that lies there is another one; the operator is told which."""
    coordinator = stage.coordinator()
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    wait_for(observer.find(Progress, since_start=True, round=2, kind="train", device="device-1"), "round 2")
    devices["device-1"].kill()
    wait_for(lambda: "device-1 left" in stage.log("coordinator"), "the last will")
    state = stage.folder / "state" / "device-1"
    blobs = [file for file in (state / "blobs").glob("*/*") if len(file.name) == 64]
    for file in [*blobs, state / "vault" / "run" / "CURRENT"]:
        flip(file, 0.9)
    devices["device-1"] = stage.device("device-1")
    stage.finish_run(coordinator, devices)
    shown = stage.show()
    assert [entry["accepted"] for entry in shown["rounds"]] == [3] * ROUNDS
    assert stage.model() == undisturbed
    told = [entry["reason"] for entry in shown["refusals"] if entry["kind"] == "damage"]
    assert told
    assert {entry["device"] for entry in shown["refusals"] if entry["kind"] == "damage"} == {"device-1"}
    assert sum("CURRENT names no stored round" in what for what in told) == 1
    assert sum(any(file.name in what for file in blobs) for what in told) == len(told) - 1
