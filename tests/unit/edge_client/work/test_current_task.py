"""The tasks that a device takes, declines, cancels and extends."""

import time
from pathlib import Path
from typing import Any

import pytest

from edge_client.settings import OwnerPolicy
from fedvit.wire.messages import Cancel, Declined, Extended, Failed, Progress, Result, RunEnded
from tests.support.agents import Setting, World, with_epochs


@pytest.mark.parametrize("changed", [{"epoch": 99}, {"instance": "an earlier process"}])
def test_a_task_for_another_process_or_epoch_is_ignored(world: World, fedavg: Setting, changed: dict[str, Any]) -> None:
    """A task that is taken is answered at once, by what the device wants."""
    world.device()
    before = len(world.server.heard)
    world.give(fedavg, **changed)
    world.server.mark()
    assert world.server.since(before) == []
    assert world.result(fedavg).round == 1


def test_the_same_task_again_starts_nothing_twice(world: World, fedavg: Setting) -> None:
    device = world.device()
    task = world.task(fedavg, program=with_epochs(fedavg.program, 40))
    for _ in range(3):
        world.server.tell(task)
    result = world.server.expect(Result)
    world.server.acknowledge(result)
    world.server.roll_call()
    assert (result.use.steps, world.server.count(Result)) == (120, 1)
    assert device.vault.round_of("run") == 1


def test_a_new_task_supersedes_the_running_one(world: World, fedavg: Setting) -> None:
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 1_000_000))
    assert world.server.expect(Progress).total_steps == 3_000_000
    result = world.result(fedavg, round=2)
    assert (result.round, result.use.steps) == (2, 6)
    assert device.vault.pending() == [result]
    world.server.acknowledge(result)
    world.server.roll_call()
    assert (world.server.count(Result), world.server.count(Failed)) == (1, 0)


def test_a_task_ends_at_its_deadline(world: World, fedavg: Setting) -> None:
    device = world.device()
    reason = world.failure(fedavg, program=with_epochs(fedavg.program, 1_000_000), deadline_s=0.4)
    assert "deadline" in reason
    assert device.vault.local("run") is None
    assert world.result(fedavg, round=2).round == 2


def test_the_end_of_a_run_stops_its_task(world: World, fedavg: Setting) -> None:
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 1_000_000))
    world.server.expect(Progress)
    world.server.tell(RunEnded("run", "failed: tests"))
    assert world.result(fedavg, run="next").run == "next"
    assert device.vault.local("run") is None


def test_the_end_of_another_run_does_not(world: World, fedavg: Setting) -> None:
    world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100))
    world.server.expect(Progress)
    world.server.tell(RunEnded("yesterday", "finished"))
    assert world.server.expect(Result).use.steps == 300


def test_a_device_that_is_not_ready_declines_and_works_when_it_is(
    world: World, fedavg: Setting, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    device = world.device(policy=OwnerPolicy(busy_file=busy))
    busy.touch()
    world.give(fedavg)
    declined = world.server.expect(Declined)
    assert (declined.run, declined.round, declined.kind) == ("run", 1, "train")
    assert declined.reason == f"busy: {busy} exists"
    assert declined.again_s == 60.0
    assert world.server.count(Failed) == 0
    assert device.vault.local("run") is None
    busy.unlink()
    assert world.result(fedavg).round == 1


def test_a_cancelled_task_is_dropped_and_nothing_of_it_is_kept(world: World, fedavg: Setting) -> None:
    """It would train for an hour; the next task is done as if that one had not been."""
    device = world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100_000))
    world.server.expect(Progress)
    world.server.tell(Cancel("run", 2, "train", "another round"))
    world.server.expect(Progress)
    world.server.tell(Cancel("run", 1, "train", "enough"))
    world.server.tell(Extended("run", 1, "train", 0.0))  # a task that were still there would fail now
    world.server.mark()
    assert device.vault.local("run") is None
    assert world.result(fedavg, round=2).round == 2
    assert world.server.count(Failed) == 0
    assert device.vault.round_of("run") == 2


def test_a_deadline_can_be_extended(world: World, fedavg: Setting) -> None:
    """3 s are too few; told in time that it has ten minutes, the device goes on until it is told to stop."""
    world.device()
    world.give(fedavg, program=with_epochs(fedavg.program, 100_000), deadline_s=3.0)
    world.server.tell(Extended("run", 1, "train", 600.0))
    began = time.monotonic()
    while time.monotonic() - began < 4.0:
        world.server.expect(Progress)
    assert world.server.count(Failed) == 0
    world.server.tell(Extended("run", 1, "train", 0.01))
    assert "not done within the deadline of" in world.server.expect(Failed).reason
