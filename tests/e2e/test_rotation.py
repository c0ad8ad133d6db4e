"""The authority of a fleet is rotated while its service and devices are killed: real processes and certificates."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from coordinator.security.broker.process import claim_port
from tests.support.draws import choose_count
from tests.support.programs import WAIT_S, Stage, program, said, wait_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

DEVICES = ("device-0", "device-1")
KILLS = 5
LONGEST_S = 6.0
"""Longest time between two kills: about as long as a device needs from the beginning to the end."""


class Fleet:
    """A deployment, its service, and devices; each process can be killed and started again."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = str(stage.folder / "deployment")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        ports = [str(claim_port()) for _ in range(2)]
        said(
            stage, "coordinator.cli", "init", self.folder, "--listen", "127.0.0.1", "--host", "localhost",
            "--port", ports[0], "--enrolment-port", ports[1],
        )  # fmt: skip

    def command(self, *arguments: str) -> Any:
        return json.loads(said(self.stage, "coordinator.cli", *arguments, "--deployment", self.folder, "--json"))

    def start(self, name: str) -> None:
        if name == "service":
            command = [*program("coordinator.cli"), "serve", "--runs", str(self.stage.out)]
            command += ["--broker.deployment", self.folder]
        else:
            command = [*program("edge_client.cli"), "--data", str(self.stage.parts / name), "--threads", "1"]
            command += ["--state", self.state(name)]
        self.processes[name] = self.stage.start(name, command)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(WAIT_S)

    def join(self, name: str) -> None:
        token = self.command("enroll", name, "--no-wait")
        said(self.stage, "edge_client.cli", "join", token["token"], "--state", self.state(name))

    def state(self, name: str) -> str:
        return str(self.stage.folder / "state" / name)

    def count_trusted(self, name: str) -> int:
        file = Path(self.state(name)) / "identity" / "authority.pem"
        return len(x509.load_pem_x509_certificates(file.read_bytes()))


def has(stage: Stage, log: str, words: str) -> Callable[[], bool]:
    return lambda: words in stage.log(log)


@pytest.mark.parametrize("seed", range(choose_count(1, 3)))
def test_nobody_is_locked_out_of_a_rotation_with_kills(stage: Stage, seed: int) -> None:
    """At drawn moments the service, with its broker, or a device is killed and started again. In the end all devices
    have the new authority alone, and train."""
    draw, fleet = random.Random(seed), Fleet(stage)
    fleet.start("service")
    wait_for(has(stage, "service", "broker: mosquitto"), "the broker")
    for name in DEVICES:
        fleet.join(name)
        fleet.start(name)
        wait_for(has(stage, name, " joined "), f"{name} to join")
    rotating = stage.start(
        "rotating", [*program("coordinator.cli"), "rotate-authority", "--deployment", fleet.folder], {}
    )
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0.0, 3.0))
        rotating.kill()
    rotating.wait(WAIT_S)
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.0, LONGEST_S))
        name = draw.choice(["service", *DEVICES])
        fleet.kill(name)
        fleet.start(name)
    if not fleet.command("rotate-authority", "--status")["next_authority"] and not has_rotated(fleet):
        fleet.command("rotate-authority")  # the command was killed before it began

    wait_for(lambda: has_rotated(fleet), "the end of the rotation")
    for name in DEVICES:
        wait_for(lambda name=name: fleet.count_trusted(name) == 1, f"{name} to drop the former authority")
    found = fleet.command("rotate-authority", "--status")
    assert (found["moved"], found["former"]) == (list(DEVICES), [])
    assert {entry["authority"] for entry in fleet.command("devices")} == {found["authority"]}
    stage.submit("run", devices=2)
    wait_for(lambda: stage.query("select 1 from runs where status = 'finished'"), "the run")
    assert stage.query("select distinct device from results order by device") == [(name,) for name in DEVICES]
    assert "Traceback" not in "".join(stage.log(name) for name in ("service", *DEVICES))


def has_rotated(fleet: Fleet) -> bool:
    return "the authority was rotated: 2 devices" in fleet.stage.log("service")


def test_many_virtual_devices_with_certificates_and_labels(stage: Stage) -> None:
    """One command lets 20 virtual devices join; they train, follow a rotation, are labelled and revoked together."""
    fleet, names = Fleet(stage), [f"device-{number}" for number in range(20)]
    fleet.start("service")
    wait_for(has(stage, "service", "broker: mosquitto"), "the broker")
    command = [*program("fleet.cli"), "host", "--deployment", fleet.folder, "--parts", str(stage.parts)]
    command += ["--devices", str(len(names)), "--state", str(stage.folder / "state"), "--label", "site=berlin,munich"]
    stage.start("host", command)
    stage.submit("run", devices=len(names))
    wait_for(lambda: stage.query("select 1 from runs where status = 'finished'"), "the run")
    assert {device for (device,) in stage.query("select distinct device from results")} == set(names)
    members = json.loads((stage.out / "run" / "members.json").read_text())
    assert {entry["device"]: entry["labels"]["site"] for entry in members if entry["device"] < "device-2"} == {
        name: "munich" if int(name.split("-")[1]) % 2 else "berlin" for name in names if name < "device-2"
    }
    fleet.command("rotate-authority")
    wait_until(
        lambda: f"rotated: {len(names)} devices" in stage.log("service"),
        lambda: f"the rotation has not ended: {stage.log('service')[-4000:]}\n{stage.log('host')[-4000:]}",
        wait_s=2 * WAIT_S,
    )
    some = names[:3]
    labelled = json.loads(
        said(stage, "coordinator.cli", "label", *some, "site=rome", "--runs", str(stage.out), "--json")
    )
    assert labelled == [{"device": name, "labels": {"site": "rome"}} for name in some]
    assert fleet.command("revoke", *some) == {"revoked": some, "notes": []}
    states = {entry["device"]: entry["state"] for entry in fleet.command("devices")}
    assert states == {name: "revoked" if name in some else "valid" for name in names}
