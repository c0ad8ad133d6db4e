"""A backup that was made while a run was served, and devices worked: the run continues from it on another machine."""

import json
import random
import shutil
from collections.abc import Callable

import pytest

from fedvit.errors import ConfigError
from tests.e2e.test_deployment import join_device, make_deployment
from tests.support.draws import choose_count
from tests.support.programs import CONFIG, DEVICES, ROUNDS, Stage, said, wait_for

VALUES = {**CONFIG, "method": "fedavg", "options": {"epochs": 4, "batch_size": 8, "lr": 1e-3}}
"""A method without personal tensors: on devices these would have moved on since the backup (docs/survival.md)."""


@pytest.fixture
def calm(calm_run: Callable[..., bytes]) -> bytes:
    """Return the final tensors of the same run without a fault."""
    return calm_run("calm-without-personal-tensors", VALUES)


@pytest.mark.parametrize("seed", range(choose_count(2, 20)))
@pytest.mark.slow
def test_run_continues_from_a_backup_bit_for_bit(stage: Stage, calm: bytes, seed: int) -> None:
    """The backup is made at a drawn moment; later the coordinator is killed, and its folder is lost."""
    draw = random.Random(seed)
    first = stage.coordinator(values={**VALUES, "devices": len(DEVICES)})
    devices = {name: stage.device(name) for name in DEVICES}
    seen, moment, later = stage.observer(), draw.randrange(10, 60), draw.randrange(1, 30)
    wait_for(lambda: len(seen.messages()) >= moment or first.poll() is not None, "the moment of the backup")
    backups = stage.folder / "backups"
    made = stage.command("backup", str(backups), "--runs", str(stage.out))
    assert made["runs"] == ["run"]
    wait_for(lambda: len(seen.messages()) >= moment + later or first.poll() is not None, "more messages")
    first.kill()
    first.wait()
    shutil.rmtree(stage.out)
    stage.out = stage.folder / "another" / "machine"
    stage.command("restore", str(backups), "--runs", str(stage.out))
    assert [path for path in (backups, *backups.rglob("*")) if path.stat().st_mode & 0o077] == []
    stage.finish_run(stage.coordinator(resume=True), devices)
    assert [entry["accepted"] for entry in stage.show()["rounds"]] == [len(DEVICES)] * ROUNDS
    assert stage.model() == calm


def test_service_makes_backups_by_itself(stage: Stage) -> None:
    """One at its start, and of every run that it has."""
    stage.submit("run", devices=1)
    backups = stage.folder / "backups"
    flags = [
        "--runs",
        str(stage.out),
        "--backup",
        str(backups),
        "--broker",
        "embedded",
        "--broker.port",
        str(stage.port),
    ]
    service = stage.fork("service", "serve", *flags)
    wait_for(lambda: " new" in stage.log("service"), "the line about the backup")
    [made] = json.loads(said(stage, "coordinator.cli", "backup", str(backups), "--list", "--json"))
    assert made["runs"] == ["run"]
    assert f"backup: {made['name']} in {backups}" in stage.log("service")
    assert service.poll() is None
    inside = stage.fork(
        "inside", "serve", "--runs", str(stage.folder / "other"), "--backup", str(stage.folder / "other" / "b")
    )
    assert stage.finish(inside, "inside") == ConfigError.exit_code


@pytest.mark.slow
def test_deployment_moves_to_another_folder_with_its_run(stage: Stage) -> None:
    """Devices connect again with their certificates, and another device can join."""
    folder = make_deployment(stage)
    first = stage.coordinator("--devices", "1", "--rounds", "40", "--broker.deployment", folder, broker="auto")
    wait_for(lambda: "broker: mosquitto" in stage.log("coordinator"), "the broker")
    device = join_device(stage, folder, "device-0")
    wait_for(lambda: "round   2/" in stage.log("coordinator"), "round 2")
    backups, moved = stage.folder / "backups", stage.folder / "moved"
    both = ["--runs", str(stage.out), "--deployment", folder]
    said(stage, "coordinator.cli", "backup", str(backups), *both)
    first.kill()
    first.wait()
    shutil.rmtree(stage.out)
    shutil.rmtree(folder)
    stage.out = moved / "runs"
    both = ["--runs", str(stage.out), "--deployment", str(moved / "deployment")]
    shown = said(stage, "coordinator.cli", "restore", str(backups), *both)
    assert "devices find the new server by the name that they know: localhost" in shown
    resumed = stage.fork("resumed", "start", "--resume", "run", "--runs", str(stage.out))
    wait_for(lambda: "device-0 joined" in stage.log("resumed"), "the device to connect again")
    join_device(stage, str(moved / "deployment"), "device-1")
    wait_for(lambda: "device-1 has joined this deployment" in stage.log("resumed"), "a new device")
    assert resumed.poll() is None
    assert device.poll() is None
