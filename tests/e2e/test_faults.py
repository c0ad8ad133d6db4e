"""What goes wrong in a real fleet, to real processes: the run goes on, and its numbers stay the same."""

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from fedvit.resources import ResourceUse
from fedvit.wire.messages import Failed, Hello, Progress, Refused, Result, ResultAck, encode
from fedvit.wire.topics import Topics
from tests.support.devices import hello
from tests.support.programs import DEVICES, ROUNDS, Observer, Stage, program, wait_for

TOPICS = Topics("home")


@pytest.mark.slow
def test_everything_is_killed_once(stage: Stage, undisturbed: bytes) -> None:
    """kill -9 of the broker in round 1, of a device in round 2, of the coordinator in round 3.

    The coordinator starts its broker again; the device does its round again from its vault; the resumed
    coordinator keeps what it had accepted, and does not count the time without it. In the end the numbers are those of
    the undisturbed run.
    """
    coordinator = stage.coordinator(broker="mosquitto")
    devices = {name: stage.device(name) for name in DEVICES}
    wait_for(lambda: "broker:" in stage.log("coordinator"), "the broker")
    observer = stage.observer()
    wait_for(observer.find(Progress, since_start=True, round=1, kind="train"), "round 1")
    [child] = _children(coordinator.pid, "mosquitto")
    devices["device-1"].send_signal(signal.SIGSTOP)  # round 1 does not end without it
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: "was started again" in stage.log("coordinator"), "the broker to be started again")
    observer.wait()
    devices["device-1"].send_signal(signal.SIGCONT)

    wait_for(observer.find(Progress, round=2, kind="train", device="device-1"), "device-1 to train in round 2")
    devices["device-1"].kill()
    wait_for(lambda: "device-1 left" in stage.log("coordinator"), "the last will")
    devices["device-1"] = stage.device("device-1")

    wait_for(lambda: stage.query("select 1 from results where round = 3 and kind = 'train'"), "a result of round 3")
    coordinator.kill()
    coordinator.wait()
    down_since = time.monotonic()
    wait_for(lambda: stage.log("device-2").count("no connection to the broker") >= 2, "devices to notice")
    assert all(process.poll() is None for process in devices.values())
    earlier = "select device, round, received_at from results where round < 3 and kind = 'train'"
    before = stage.query(earlier)
    down_s = time.monotonic() - down_since
    assert stage.finish(stage.coordinator(broker="mosquitto", resume=True), "coordinator") == 0, stage.log(
        "coordinator"
    )
    assert all(stage.finish(process, name) == 0 for name, process in devices.items())
    assert stage.query(earlier) == before
    [(opened, closed, figures)] = stage.query("select opened_at, closed_at, figures from rounds where round = 3")
    took_s = (datetime.fromisoformat(closed) - datetime.fromisoformat(opened)).total_seconds()
    times = json.loads(figures)
    assert times["devices_s"] + times["server_s"] <= took_s - down_s, "nobody worked while no coordinator was there"
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [3] * ROUNDS
    assert stage.model() == undisturbed


def _children(parent: int, marker: str) -> list[int]:
    """Processes started by `parent` whose command line holds `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status, command = (folder / "status").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and marker.encode() in command:
            found.append(int(folder.name))
    return found


class Impostor:
    """A device that speaks the protocol through a plain MQTT client, and lies."""

    def __init__(self, observer: Observer, name: str, classes: tuple[str, ...]) -> None:
        self.observer = observer
        self.name = name
        self.classes = classes

    def say(self, message: Hello | Result | Failed) -> None:
        self.observer.publish(TOPICS.from_device(self.name), encode(message))

    def hello(self) -> None:
        self.say(hello("impostor", classes=self.classes, train_samples=50, test_samples=10))


def test_strangers_are_answered_and_counted(stage: Stage) -> None:
    """Another protocol version, garbage, an unknown class and a result out of nowhere: refused, nothing falls over."""
    coordinator = stage.coordinator("--class", "0", "--class", "1")
    wait_for(lambda: "waiting for 3 devices" in stage.log("coordinator"), "the coordinator")
    observer = stage.observer()
    observer.publish(TOPICS.from_device("old"), b"\x63" + b"anything")
    wait_for(observer.find(Refused, since_start=True, device="old", final=True), "an answer to the old device")
    observer.publish(TOPICS.from_device("noise"), b"\x01\xff\xff")
    owl = Impostor(observer, "owl", ("0", "1", "owls"))
    owl.hello()
    refused = wait_for(observer.find(Refused, since_start=True, device="owl"), "an answer to the owl")
    assert isinstance(refused, Refused)
    assert "'owls'" in refused.reason
    assert refused.final
    nowhere = Result("other-run", 1, "train", 5, {}, ResourceUse())
    owl.say(nowhere)
    answer = wait_for(observer.find(ResultAck, since_start=True, device="owl"), "an answer to the stray result")
    assert isinstance(answer, ResultAck)
    assert "other-run" in answer.reason
    reasons = " ".join(entry["reason"] for entry in stage.show()["refusals"])
    assert "wire version 99" in reasons
    assert "cannot be read" in reasons
    assert coordinator.poll() is None
    refusing = stage.device("device-0")  # has ten classes, the run knows two
    assert stage.finish(refusing, "device-0") == 5
    [line] = [line for line in stage.log("device-0").splitlines() if line.startswith("edge-client:")]
    assert "'2'" in line
    assert "Traceback" not in stage.log("device-0")


def test_wrong_broker_address(stage: Stage) -> None:
    """A device keeps trying and says why in one line; the coordinator too; both leave when asked."""
    device = stage.start(
        "lost",
        [
            *program("edge_client.cli"), "--broker", "no-such-host.invalid", "--data", str(stage.parts / "device-0"),
            "--state", str(stage.folder / "lost"),
        ],
    )  # fmt: skip
    coordinator = stage.coordinator(broker=f"mqtt://127.0.0.1:{stage.port}")
    wait_for(lambda: "no-such-host.invalid" in stage.log("lost"), "the device to name the host")
    wait_for(lambda: "refused" in stage.log("coordinator"), "the coordinator to say that nobody answers")
    assert f"127.0.0.1:{stage.port}" in stage.log("coordinator")
    for process, name, code in ((device, "lost", 0), (coordinator, "coordinator", 130)):
        process.send_signal(signal.SIGINT)
        assert stage.finish(process, name) == code
        assert "Traceback" not in stage.log(name)
