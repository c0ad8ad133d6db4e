"""Power cuts at drawn moments while a device joins, trains its first and later rounds, and changes its version.

Its files are on a real ext4 that loses what was not synced (tests/support/ext4.py). Root runs it: make power-cuts.
FEDVIT_POWER_CUTS is the number of all cuts, FEDVIT_POWER_SEED repeats drawn moments as far as a machine does.
"""

import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from coordinator.security.broker.process import claim_port
from edge_client.link.identity import Identity
from fedvit.files import atomic_write
from fedvit.transport.base import Connected
from fedvit.transport.mqtt import MqttTransport
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.support.ext4 import CutDisk
from tests.support.federation import count_duplicates
from tests.support.installations import Device, Publisher
from tests.support.programs import Stage, program, said, wait_for
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.timeout(7200)

CUTS = int(os.environ.get("FEDVIT_POWER_CUTS", "50"))
SEED = int(os.environ.get("FEDVIT_POWER_SEED", str(time.time_ns() % 10**9)))
NAME = "device-0"
VALUES: dict[str, Any] = {
    "method": "fedper",
    "seed": 5,
    "devices": 1,
    "options": {"batch_size": 8, "epochs": 60, "lr": 0.05, "momentum": 0.9},
    "model_options": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2},
    "deadline_s": 1800.0,
    "rejoin_grace_s": 900.0,
}
"""A method with personal tensors, so that each round is written into the vault."""


def count_cuts(share: float) -> int:
    """Count the cuts of a check that has this share of all."""
    return max(1, round(CUTS * share))


@pytest.fixture
def moments() -> random.Random:
    return random.Random(SEED)


@pytest.fixture
def disk(stage: Stage, tmp_path: Path) -> Iterator[CutDisk]:
    """The disk with the device's state."""
    disk = CutDisk(tmp_path / "disk.img", stage.folder / "state", SEED)
    yield disk
    stage.close()
    disk.unmount()


def start(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a program with a group of its own, without output."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def cut(disk: CutDisk, process: "subprocess.Popen[bytes]") -> None:
    """Cut the power of a disk and of the program that uses it."""
    if os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()
    disk.cut()


def is_admitted(state: Path) -> bool:
    """Return whether the broker admits the device that has joined."""
    inbox: SimpleQueue[object] = SimpleQueue()
    transport = MqttTransport(inbox, Identity(state / "identity").address(), NAME)
    transport.open()
    try:
        return isinstance(inbox.get(timeout=WAIT_S), Connected)
    finally:
        transport.close()


def test_disk_loses_what_was_not_synced(disk: CutDisk) -> None:
    lost = 0
    for number in range(8):
        synced, other = disk.folder / f"synced-{number}", disk.folder / f"other-{number}"
        atomic_write(synced, b"kept" * 5000)
        other.write_bytes(b"lost" * 5000)
        disk.cut()
        assert synced.read_bytes() == b"kept" * 5000
        lost += not other.exists() or other.read_bytes() != b"lost" * 5000
    assert lost == 8


def test_power_cuts_in_training(
    stage: Stage, disk: CutDisk, moments: random.Random, graph_cache: Path, tmp_path: Path
) -> None:
    """It always rejoins, no result is lost or counts twice, and the model is that of an undisturbed run."""
    cuts = count_cuts(0.4)
    values = {**VALUES, "rounds": 3 + 2 * cuts}  # one may close while the moment comes
    simulate(RunRequest([stage.parts / NAME], values, out=tmp_path / "calm", run="run", graph_cache=graph_cache))
    coordinator, device = stage.coordinator(values=values), stage.device(NAME)
    closed = "select count(*) from rounds where closed_at is not null"

    def count_rounds() -> int:
        assert coordinator.poll() in (None, 0), stage.log("coordinator")[-3000:]
        rows = stage.query(closed)
        return int(rows[0][0]) if rows else 0

    wait_for(lambda: stage.query("select 1 from tasks"), "the first task")
    round_s = 3.0
    for number in range(cuts):
        delay_s = moments.uniform(0, round_s)
        time.sleep(delay_s)  # the moment is drawn, not waited for
        cut(disk, device)
        before = count_rounds()
        device, began = stage.device(NAME), time.monotonic()
        wait_until(lambda: count_rounds() > before, lambda: stage.log(NAME)[-3000:], pause_s=0.05)  # noqa: B023
        print(f"{number + 1}: cut after {delay_s:.1f} s; {time.monotonic() - began:.1f} s from start to closed round")
        if number == 0:  # a whole round is known by now
            began = time.monotonic()
            wait_for(lambda: count_rounds() > before + 1, "a round without a cut")  # noqa: B023
            round_s = time.monotonic() - began
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(device, NAME) == 0, stage.log(NAME)
    print(f"seed {SEED}: {disk.cuts} cuts; a round takes {round_s:.1f} s")
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [1] * values["rounds"]
    assert count_duplicates(stage.out / "run" / "coordinator.log") == 0
    assert stage.model() == (tmp_path / "calm" / "run" / "model.safetensors").read_bytes()


def test_power_cuts_while_joining(stage: Stage, disk: CutDisk, moments: random.Random) -> None:
    """A token that was not used up joins it after the cut; one that was used is not needed again."""
    folder, ports = str(stage.folder / "deployment"), [str(claim_port()) for _ in range(2)]
    said(
        stage, "coordinator.cli", "init", folder, "--listen", "127.0.0.1", "--host", "localhost",
        "--port", ports[0], "--enrolment-port", ports[1],
    )  # fmt: skip
    cuts, state, token = count_cuts(0.2), disk.folder / NAME, disk.folder / "token"
    coordinator = stage.coordinator("--broker.deployment", folder, broker="auto", values={**VALUES, "rounds": 1})
    wait_for(lambda: "broker: " in stage.log("coordinator"), "the broker")
    # as fedvit-join.service does: it joins, then it removes the token
    join = f"{shlex.join(program('edge_client.cli'))} join @{token} --state {state} && rm {token}"
    join_s = 4.0
    for number in range(cuts):
        flags = ["enroll", NAME, "--deployment", folder, "--no-wait", "--replace"]
        shutil.rmtree(state, ignore_errors=True)
        token.write_text(said(stage, "coordinator.cli", *flags).split()[-1])
        token.chmod(0o600)
        os.sync()
        delay_s = moments.uniform(0, join_s * 1.3)
        process = start(["bash", "-c", join], stage.environment)
        time.sleep(delay_s)  # the moment is drawn, not waited for
        cut(disk, process)
        again = token.exists()
        if again:
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", join], env=stage.environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            join_s = time.monotonic() - began
        print(f"{number + 1}: cut after {delay_s:.1f} s; {'joined with the same token' if again else 'had joined'}")
        assert is_admitted(state)
    command = [*program("edge_client.cli"), "--data", str(stage.parts / NAME), "--state", str(state), "--threads", "1"]
    device = stage.start(NAME, [*command, "--once"])
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    assert stage.finish(device, NAME) == 0, stage.log(NAME)
    print(f"seed {SEED}: {disk.cuts} cuts")


def test_power_cuts_in_updates(disk: CutDisk, moments: random.Random, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From one version to the next and back: always one version works."""
    publisher = Publisher(tmp_path_factory.mktemp("publisher") / "files")
    publisher.publish("0.2.0")
    device = Device(disk.folder / "device")
    began = time.monotonic()
    done = device.update(str(publisher.releases), "--update-key", publisher.key.public)
    assert done.returncode == 0, done.stderr
    update_s = time.monotonic() - began
    began = time.monotonic()
    assert device.update("--back").returncode == 0
    back_s = time.monotonic() - began
    os.sync()
    cuts, versions = count_cuts(0.4), []
    for number in range(cuts):
        is_new = device.read_version() == "0.2.0"
        delay_s = moments.uniform(0, (back_s if is_new else update_s) * 1.1)
        command = [str(device.program), "update", "--back" if is_new else "--retry"]
        process = start(command, device.environment)
        time.sleep(delay_s)  # the moment is drawn, not waited for
        cut(disk, process)
        versions.append(device.read_version())
        print(f"{number + 1}: {command[-1]} cut after {delay_s:.1f} s: {versions[-1]}")
    print(f"seed {SEED}: {disk.cuts} cuts; an update takes {update_s:.1f} s, a way back {back_s:.1f} s")
    assert set(versions) <= {"0.1.0", "0.2.0"}
    if versions[-1] == "0.1.0":
        assert device.update("--retry").returncode == 0
    assert device.read_version() == "0.2.0"
    assert device.update("--back").returncode == 0
    assert device.read_version() == "0.1.0"
