"""Devices run graphs of the publisher that they trust since they joined; its key can be on another machine."""

import re
import shlex
from pathlib import Path

import pytest

from fedvit.errors import ConfigError
from fedvit.known_graphs import read_signatures
from tests.e2e.test_deployment import make_deployment
from tests.support.programs import Stage, program, said, wait_for


def enroll(stage: Stage, folder: str, name: str, *more: str) -> str:
    return said(stage, "coordinator.cli", "enroll", name, "--deployment", folder, "--no-wait", *more).split()[-1]


def start_device(stage: Stage, name: str) -> None:
    state = ["--state", str(stage.folder / "state" / name)]
    train = ["--data", str(stage.parts / name), *state, "--threads", "1", "--once"]
    stage.start(name, [*program("edge_client.cli"), *train])


@pytest.mark.slow
def test_run_waits_for_the_signatures_of_a_key_elsewhere(stage: Stage) -> None:
    """The deployment's own key signs by itself. Without it the run says what is missing, and goes on when it comes."""
    folder = make_deployment(stage)
    key = Path(folder) / "publisher.key"
    elsewhere = key.rename(stage.folder / "publisher.key")
    publisher = (Path(folder) / "publisher").read_text().strip()
    state = ["--state", str(stage.folder / "state" / "device-0")]
    flags = ["--devices", "1", "--rounds", "1", "--broker.deployment", folder]
    coordinator = stage.coordinator(*flags, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    shown = said(stage, "edge_client.cli", "join", enroll(stage, folder, "device-0"), *state)
    assert f"methods: fedvit's own on standard models, and those that publisher {publisher} signed" in shown
    start_device(stage, "device-0")
    line = f"device-0 does not allow graphs that publisher {publisher} has not signed, which"
    wait_for(lambda: line in stage.log("coordinator"), "the line about device-0")
    assert coordinator.poll() is None
    listed = said(stage, "coordinator.cli", "devices", "--deployment", folder, "--runs", str(stage.out))
    assert "device-0 does not allow graphs that its publisher has not signed" in listed.splitlines()
    signatures = Path(folder) / "signatures.txt"
    [hint] = re.findall(r"to sign them: coordinator (plan .*)", stage.log("coordinator"))
    plan = shlex.split(hint.replace("BOARD", "rpi5-8").replace("KEY", str(elsewhere)))
    assert stage.finish(stage.fork("plan", *plan, "--json"), "plan") == 0, stage.log("plan")
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    signed = read_signatures(signatures)
    assert signed is not None
    assert signed.publisher == publisher
    again = stage.coordinator(*flags, "--run", "again", broker="auto")
    start_device(stage, "device-0")
    assert stage.finish(again, "coordinator") == 0, stage.log("coordinator")
    assert read_signatures(signatures) == signed


@pytest.mark.slow
def test_another_publisher_needs_the_owners_word(stage: Stage) -> None:
    """A device that joins again trusts the publisher of before, until its owner says otherwise."""
    key = stage.folder / "other.key"
    publisher = said(stage, "coordinator.cli", "sign", str(key), "--new").split()[0]
    first, second = make_deployment(stage), str(stage.folder / "second")
    ports = ["--port", "0", "--enrolment-port", "0", "--host", "localhost", "--listen", "127.0.0.1"]
    said(stage, "coordinator.cli", "init", second, "--publisher", publisher, *ports)
    assert not (Path(second) / "publisher.key").exists()
    state = ["--state", str(stage.folder / "state" / "device-0")]
    with_first = stage.start("first", [*program("coordinator.cli"), "enroll", "device-0", "--deployment", first])
    wait_for(lambda: "edge-client join" in stage.log("first"), "the token")
    token = stage.log("first").split("edge-client join ")[1].split()[0]
    said(stage, "edge_client.cli", "join", token, *state)
    assert stage.finish(with_first, "first") == 0
    stage.start("second", [*program("coordinator.cli"), "enroll", "device-0", "--deployment", second])
    wait_for(lambda: "edge-client join" in stage.log("second"), "the token")
    token = stage.log("second").split("edge-client join ")[1].split()[0]
    join = [*program("edge_client.cli"), "join", token, *state, "--replace"]
    assert stage.finish(stage.start("again", join), "again") == ConfigError.exit_code
    assert "THE PUBLISHER HAS CHANGED" in stage.log("again")
    assert f"publisher {publisher} signed" in said(stage, "edge_client.cli", *join[-5:], "--replace-publisher")
