"""Results and failures stay until they are acknowledged."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edge_client.link import resending
from edge_client.work import task_executor as task_executor_module
from fedvit.policy import Policy, TrainPolicy
from fedvit.tensors import pack
from fedvit.wire.messages import (
    Cancel,
    Declined,
    Failed,
    FromCoordinator,
    Hello,
    Progress,
    Result,
    ResultAck,
    RunEnded,
    Welcome,
)
from tests.support.agents import Setting, World, with_epochs, with_local_head


@pytest.fixture
def repeating(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device repeats at once a message without an answer."""
    monkeypatch.setattr(resending, "AGAIN_S", 0.0)
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.0)


ANSWERS_TO_A_REFUSAL: dict[str, Callable[[Failed | Declined], FromCoordinator]] = {
    "acknowledged": lambda said: ResultAck(said.run, said.round, said.kind, accepted=False),
    "cancelled": lambda said: Cancel(said.run, said.round, said.kind, "the round is over"),
    "run ended": lambda said: RunEnded(said.run, "failed"),
}


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("answer", ANSWERS_TO_A_REFUSAL.values(), ids=ANSWERS_TO_A_REFUSAL)
@pytest.mark.parametrize("kind", [Failed, Declined])
def test_failures_and_refusals_are_repeated_until_they_are_answered(
    world: World,
    fedavg: Setting,
    tmp_path: Path,
    kind: type[Failed | Declined],
    answer: Callable[[Failed | Declined], FromCoordinator],
) -> None:
    busy, server = tmp_path / "busy", world.server
    world.device(policy=Policy(train=TrainPolicy(busy_file=busy)))
    if kind is Declined:
        busy.touch()
    world.give(fedavg, groups={}, task="what nobody can do")
    said = server.expect(kind)
    assert [server.expect(kind) for _ in range(3)] == [said] * 3
    server.tell(ResultAck("other", said.round, said.kind, accepted=False))  # about another run
    assert [server.expect(kind) for _ in range(3)] == [said] * 3
    busy.unlink(missing_ok=True)
    server.tell(answer(said))
    server.is_here(server.epoch + 1)
    server.expect(Hello)  # by now the device knows the answer
    before = server.count(kind)
    server.tell(Welcome(server.instance, server.epoch, "tests"))  # with which all that is pending is said again
    server.mark()
    assert server.count(kind) == before


@pytest.mark.usefixtures("repeating")
def test_failure_that_was_lost_with_the_link_is_said_after_the_next_welcome(world: World, fedavg: Setting) -> None:
    device, server = world.device(), world.server
    world.give(fedavg, program=with_epochs(fedavg.program, 500_000), deadline_s=600.0)
    server.expect(Progress)
    world.broker.stop()
    assert device.agent.current.execution is not None
    device.agent.current.execution.expires_at = 0.0  # the deadline passes while nobody can be told
    server.wait(lambda: device.agent.current.execution is None)
    world.broker.start()
    server.is_here(server.epoch + 1)
    server.welcome()
    assert "not done within the deadline" in server.expect(Failed).reason


def test_task_that_was_given_again_is_left_when_its_failure_is_acknowledged(world: World, fedavg: Setting) -> None:
    """The coordinator heard of the failure after all; to go on would only cost energy."""
    device, server = world.device(), world.server
    world.give(fedavg, groups={})
    failed = server.expect(Failed)
    world.give(fedavg, program=with_epochs(fedavg.program, 500_000))
    server.expect(Progress)
    server.tell(ResultAck(failed.run, failed.round, failed.kind, accepted=False))
    server.wait(lambda: device.agent.current.execution is None)


def test_a_result_is_sent_until_it_is_acknowledged(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resending, "AGAIN_S", 0.05)
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.1)
    device = world.device()
    first = world.result(fedavg)
    assert [world.server.expect(Result) for _ in range(3)] == [first] * 3
    world.server.acknowledge(first)
    world.server.wait(lambda: device.vault.pending() == [])
    world.server.roll_call()
    said = world.server.count(Result)
    time.sleep(0.5)  # five times the longest wait
    world.server.roll_call()
    assert world.server.count(Result) == said


def test_a_result_survives_the_device(world: World, fedavg: Setting) -> None:
    """Started again from the same state, it sends the same bytes, and trains nothing: the vault's folder stays."""
    first = world.device()
    result = world.result(fedavg)
    upload = first.blobs.get(result.upload.digest)  # type: ignore[union-attr]
    first.stop()
    committed = sorted(first.vault.folder.rglob("*"))
    again = world.device()
    assert again.agent.link.instance != first.agent.link.instance
    assert world.server.expect(Result) == result
    before = len(world.server.heard)
    assert world.result(fedavg) == result
    assert "Progress" not in world.server.since(before)
    assert sorted(again.vault.folder.rglob("*")) == committed
    assert pack(world.server.fetch(result.upload)) == upload
    world.server.acknowledge(result)
    world.server.wait(lambda: again.vault.pending() == [])


def test_progress_is_said_as_often_as_the_task_asks(world: World, fedavg: Setting) -> None:
    """At the first step, at the last, and in between only where the interval has passed: here it never has."""
    world.device()
    result = world.result(fedavg, program=with_epochs(fedavg.program, 150), progress_s=3600.0)
    said = [
        (message.done_steps, message.total_steps) for message in world.server.heard if isinstance(message, Progress)
    ]
    assert said == [(1, result.use.steps), (result.use.steps, result.use.steps)]


def test_progress_is_in_the_log_of_the_device(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task_executor_module, "LOG_EVERY_S", 0.0)
    caplog.set_level("INFO")
    world.device()
    result = world.result(fedavg, program=with_epochs(fedavg.program, 3))
    said = [record.__dict__["steps"] for record in caplog.records if record.getMessage() == "task in progress"]
    assert said == [f"{step}/{result.use.steps}" for step in range(1, int(result.use.steps) + 1)]


def test_what_a_device_says_of_a_task_names_the_task(world: World, fedavg: Setting, tmp_path: Path) -> None:
    """A result does, and names its Program, also when another process of the device sends it again."""
    first, server = world.device(), world.server
    task = world.task(fedavg, task="digest of what is asked")
    server.tell(task)
    assert server.expect(Progress).task == task.task
    result = server.expect(Result)
    assert (result.task, result.program) == (task.task, task.program)
    first.stop()
    busy = tmp_path / "busy"
    world.device(policy=Policy(train=TrainPolicy(busy_file=busy)))
    assert server.expect(Result) == result
    busy.touch()
    server.tell(world.task(fedavg, round=2, task="another"))
    assert server.expect(Declined).task == "another"
    busy.unlink()
    world.give(fedavg, round=3, groups={}, task="nothing is brought")
    assert server.expect(Failed).task == "nothing is brought"


def test_a_result_of_a_run_that_is_not_known_now_is_kept_and_sent_in_the_next_epoch(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, server = world.device(), world.server
    monkeypatch.setattr(resending, "AGAIN_S", 0.0)  # of results from now on
    monkeypatch.setattr(resending, "AGAIN_MAX_S", 0.0)
    result = world.result(fedavg)
    assert server.expect(Result) == result, "it is repeated until it is answered"
    server.tell(ResultAck(result.run, result.round, result.kind, False, "run 'other' is served here", keep=True))
    server.mark()
    said = server.count(Result)
    server.tell(Welcome(server.instance, server.epoch, "tests"))  # the same epoch: nothing is new
    for _ in range(5):
        server.mark()
    assert server.count(Result) == said
    assert device.vault.pending() == [result]
    server.is_here(server.epoch + 1)
    server.welcome()
    server.wait(lambda: server.count(Result) > said)
    server.acknowledge(result)
    server.wait(lambda: device.vault.pending() == [])


def test_a_result_survives_other_tasks(world: World, fedavg: Setting) -> None:
    """Blobs that no task names are deleted, but not an upload that nobody has fetched."""
    world.device()
    result = world.result(fedavg)
    assert world.result(fedavg, run="other", kind="evaluate").run == "other"
    world.server.mark()
    assert set(world.server.fetch(result.upload)) == set(fedavg.program.tensors)


def test_a_result_whose_upload_is_gone_is_lost_and_the_device_is_not(world: World, fedavg: Setting) -> None:
    """Found by fuzzing: a newer task had tidied up. Such a device ended, and ended again at each start."""
    first = world.device()
    result = world.result(fedavg)
    first.stop()
    first.blobs.path(result.upload.digest).unlink()  # type: ignore[union-attr]
    again = world.device()
    lost = world.server.expect(Failed)
    assert (lost.run, lost.round, lost.kind) == (result.run, result.round, "train")
    assert "is not in PATH" in lost.reason
    world.server.wait(lambda: again.vault.pending() == [])
    assert world.result(fedavg, run="other", kind="evaluate").run == "other"


def test_a_result_survives_the_link(world: World, fedavg: Setting) -> None:
    world.device()
    result = world.result(fedavg)
    world.broker.stop()
    world.broker.start()
    world.server.is_here(world.server.epoch + 1)
    world.server.welcome()
    assert world.server.expect(Result) == result


def test_a_refused_result_is_settled(world: World, fedavg: Setting) -> None:
    """Its personal tensors stay: they are as good as before."""
    device = world.device()
    result = world.result(fedavg, program=with_local_head(fedavg))
    world.server.acknowledge(result, accepted=False)
    world.server.roll_call()
    assert device.vault.pending() == []
    assert device.vault.local("run") is not None
    world.server.roll_call()
    assert world.server.count(Result) == 1


def test_an_acknowledgement_of_something_else_settles_nothing(world: World, fedavg: Setting) -> None:
    device = world.device()
    result = world.result(fedavg)
    for wrong in (
        msgspec.structs.replace(result, round=2),
        msgspec.structs.replace(result, run="other"),
        msgspec.structs.replace(result, kind="evaluate"),
    ):
        world.server.acknowledge(wrong)
    world.server.roll_call()
    assert world.server.expect(Result) == result
    assert device.vault.pending() == [result]


def test_once_leaves_with_a_result_of_another_run(world: World, fedavg: Setting) -> None:
    """Nobody acknowledges while that run is interrupted; the vault keeps the result for it."""
    device = world.device(once=True)
    result = world.result(fedavg, run="other")
    world.server.tell(RunEnded("run", "finished"))
    assert device.ended() == "run run finished"
    assert device.vault.pending() == [result]
