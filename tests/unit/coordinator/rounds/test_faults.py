"""What one device, one fault of ours, or a second coordinator does to a run: nothing that others would notice."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.record.record import open_record
from coordinator.rounds import scheduler, sender_limits, uploads
from coordinator.rounds.collector import ResultCollector
from coordinator.rounds.device_profiles import DeviceProfiles
from coordinator.rounds.inbox import Inbox
from coordinator.rounds.lease import FederationTaken
from coordinator.rounds.membership import Admission
from coordinator.rounds.recovery import Recovery
from coordinator.rounds.scheduler import TaskScheduler
from fedvit.errors import BadPayload
from fedvit.tensors import Tensors
from fedvit.transport.blob_receiver import BlobReceiver
from fedvit.transport.exchange import BlobExchange
from fedvit.transport.url_transfers import UrlReceiver
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    BlobPut,
    Cancel,
    Declined,
    DeviceState,
    FromCoordinator,
    Progress,
    Refused,
    ResultAck,
    Task,
    Welcome,
    encode,
)
from tests.support.runs import Answer, Fake, Stage, assert_moved_by, honest, silent

pytestmark = pytest.mark.usefixtures("known")


def dies(device: Fake, task: Task) -> None:
    device.start_again()


# --- a device that floods ----------------------------------------------------------------------------


def test_a_device_without_a_certificate_that_floods_is_banned(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its round closes with the other's result, nothing more of it is heard, and it is told that this is final."""
    monkeypatch.setattr(sender_limits, "STRIKE_EVERY_S", 0.0)
    stage.fake("good")
    mallory = stage.fake("mallory", silent)
    stage.start(devices=2, rounds=2)
    stage.drive(lambda: mallory.got(Task))
    for _ in range(4 * sender_limits.STRIKE_MESSAGES):
        mallory.transport.publish(mallory.topics.from_device("mallory"), bytes(1000))
    assert stage.finish() == "finished"
    assert (stage.accepted(1), stage.accepted(2)) == (["good"], ["good"])
    assert any("mallory" in line and "banned" in line for line in stage.lines)
    assert [one.final for one in mallory.got(Refused) if "floods" in one.reason] == [True]
    assert sum(refusal.startswith("flood: ") for refusal in stage.refusals("mallory")) == sender_limits.STRIKES
    assert_moved_by(stage, first, 2.0)


# --- devices that end at their tasks ------------------------------------------------------------------


def test_a_device_that_ends_at_every_task_holds_no_round(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given its task three times, then the round closes with the other's result; and it is left alone a while."""
    monkeypatch.setattr(scheduler, "BACK_OFF_S", 0.01)
    stage.fake("good")
    loops = stage.fake("loops", dies, value=1000.0)
    stage.start(devices=2, rounds=2, deadline_s="auto")
    assert stage.finish() == "finished"
    assert [(task.round, task.attempt) for task in loops.got(Task)] == [(1, 1), (1, 2), (1, 3)]
    assert stage.refusals("loops") == ["train: no result: its process ended 3 times at this task"]
    assert [refusal.lost for refusal in stage.store.devices.read_refusals("r")] == [True]
    assert any("loops: no result: its process ended 3 times" in line and "60 s" in line for line in stage.lines)
    assert (stage.accepted(1), stage.accepted(2)) == (["good"], ["good"])
    assert_moved_by(stage, first, 2.0)


def test_a_device_that_ends_once_is_given_its_task_again_at_once(stage: Stage, first: Tensors) -> None:
    unlucky = stage.fake("a", lambda device, task: dies(device, task) if task.attempt == 1 else honest(device, task))
    stage.start(deadline_s="auto")
    assert stage.finish() == "finished"
    assert [task.attempt for task in unlucky.got(Task) if task.kind == "train"] == [1, 2]
    assert stage.store.devices.read_refusals("r") == []


def test_attempts_are_counted_over_a_restart_of_the_coordinator(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BACK_OFF_S", 0.01)
    stage.fake("good")
    loops = stage.fake("loops", lambda device, task: dies(device, task) if task.attempt < 2 else None)
    stage.start(devices=2, deadline_s="auto")
    stage.drive(lambda: [task.attempt for task in loops.got(Task)] == [1, 2])
    stage.stop()
    loops.on_task = dies
    stage.start(devices=2, deadline_s="auto", resume=True)
    assert stage.finish() == "finished"
    assert [task.attempt for task in loops.got(Task)] == [1, 2, 2, 3]
    assert stage.accepted(1) == ["good"]


# --- results of something else than what is asked -----------------------------------------------------


def test_result_of_another_task_is_no_strike_and_the_task_is_sent_again(stage: Stage, first: Tensors) -> None:
    """What is asked may have changed since the device began, by no fault of its own."""

    def of_another(device: Fake, task: Task) -> None:
        result = device.answer(task)
        if len(device.tasks()) == 1:
            result = msgspec.structs.replace(result, task="another", program="blake3:another")
        device.bring(msgspec.structs.replace(result, task=result.task or task.task))

    device = stage.fake("a", of_another)
    stage.start(robust={"strikes": 1})
    assert stage.finish() == "finished"
    first_told, again = (task for task in device.got(Task) if task.kind == "train")
    assert first_told.task == again.task != ""
    assert stage.refusals("a") == [
        f"train: it is of task another, expected is {again.task}: the task is sent again",
    ]
    assert stage.store.strikes.read_all("r") == []
    assert_moved_by(stage, first, 1.0)


def test_a_device_that_is_absent_at_a_resume_is_asked_what_it_was_asked(stage: Stage, first: Tensors) -> None:
    """Nothing is known of it then; its result, made meanwhile, counts."""
    stage.fake("a")
    away = stage.fake("away", silent, value=3.0)
    stage.start(devices=2)
    stage.drive(lambda: stage.accepted(1) == ["a"] and away.tasks() == [1])
    asked = away.got(Task)[0]
    stage.stop()
    away.transport.vanish()
    stage.start(devices=1, resume=True)
    assert stage.coordinator is not None
    state = stage.coordinator.state
    stage.drive(lambda: bool(state.tasks.of("away")))
    away.on_task = honest
    away.transport.open(away.transport.will)
    assert stage.finish() == "finished"
    told = [task for task in away.got(Task) if task.kind == "train"]
    assert [(task.task, task.program, task.groups) for task in told] == 2 * [(asked.task, asked.program, asked.groups)]
    assert_moved_by(stage, first, 2.0)


def test_what_a_result_teaches_is_learned_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is said before its upload is here; and nothing by a result of another run."""
    learned: list[str] = []
    learn = DeviceProfiles.learn

    def count(profiles: DeviceProfiles, device: str, *args: Any) -> None:
        learned.append(device)
        learn(profiles, device, *args)

    monkeypatch.setattr(DeviceProfiles, "learn", count)

    def again_and_again(device: Fake, task: Task) -> None:
        result = device.answer(task)
        device.say(msgspec.structs.replace(result, run="another"))
        device.bring(result)
        for _ in range(3):
            device.say(result)

    stage.fake("a", again_and_again)
    stage.start(evaluate_every=9)
    assert stage.finish() == "finished"
    assert learned == ["a", "a"], "its training, and its evaluation"


# --- faults of ours -----------------------------------------------------------------------------------


def say_progress(device: Fake, task: Task) -> None:
    device.say(Progress(task.run, task.round, task.kind, 1, 2))


def decline(device: Fake, task: Task) -> None:
    device.say(Declined(task.run, task.round, task.kind, "busy", 600.0))


def fail(device: Fake, task: Task) -> None:
    device.fail(task, "no memory")


def fetch(device: Fake, task: Task) -> None:
    wanted = task.blobs[0].digest
    device.say(BlobNack(wanted, ((0, 1),)))
    device.say(BlobAck(wanted))
    honest(device, task)


def put(device: Fake, task: Task) -> None:
    device.say(BlobPut(task.blobs[0].digest, 0, 1, stored=True))
    honest(device, task)


def leave(device: Fake, task: Task) -> None:
    device.say(DeviceState(device.instance, online=False))
    device.transport.publish(
        device.topics.device_state(device.name), encode(DeviceState(device.instance, online=False))
    )


HANDLERS: dict[str, tuple[type, str, Answer]] = {
    "Hello": (Admission, "on_hello", honest),
    "DeviceState": (Admission, "on_state", leave),
    "Result": (ResultCollector, "on_result", honest),
    "Failed": (ResultCollector, "on_failed", fail),
    "Declined": (ResultCollector, "on_declined", decline),
    "Progress": (TaskScheduler, "on_progress", say_progress),
    "BlobNack": (Recovery, "can_serve", fetch),
    "BlobPut": (UrlReceiver, "on_put", put),
    "BlobAck": (BlobExchange, "on_ack", fetch),
    "chunk": (BlobReceiver, "heard", honest),
}


@pytest.mark.parametrize("what", HANDLERS)
def test_an_error_in_handling_a_message_of_one_device_ends_its_task_alone(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner, name, on_task = HANDLERS[what]
    handle = getattr(owner, name)

    def broken(self: Any, device: str, *args: Any, **kwargs: Any) -> Any:
        if device == "bad" or (what == "chunk" and "/bad/" in device):
            raise KeyError("a fault of ours")
        return handle(self, device, *args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    stage.fake("good")
    stage.fake("bad", on_task, value=1000.0, samples=1000)
    stage.start(devices=1 if what == "Hello" else 2, evaluate_every=9)
    stage.drive(lambda: any("bad: an error in handling" in line for line in stage.lines))
    assert stage.finish() == "finished"
    assert f"error: an error in handling its {what}: KeyError: 'a fault of ours'" in stage.refusals("bad")
    assert "good" in stage.accepted(1)


def test_an_error_in_looking_at_the_upload_of_one_device_ends_its_task_alone(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = uploads.check_upload

    def broken(upload: Any, program: Any, what: str) -> Any:
        if "of bad for" in what:
            raise KeyError("a fault of ours")
        return check(upload, program, what)

    monkeypatch.setattr(uploads, "check_upload", broken)
    stage.fake("good")
    stage.fake("bad", value=1000.0, samples=1000)
    stage.start(devices=2, rounds=2)
    assert stage.finish() == "finished"
    assert stage.refusals("bad") == 2 * ["error: an error in handling its Result: KeyError: 'a fault of ours'"]
    assert_moved_by(stage, first, 2.0)


def test_a_task_that_fits_no_message_is_the_end_of_that_task_alone(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Inbox.send

    def too_large(inbox: Inbox, device: str, message: FromCoordinator) -> None:
        if device == "bad" and isinstance(message, Task):
            raise BadPayload("FV0006", "a Task message of 70000 bytes exceeds the limit of 65536 bytes")
        send(inbox, device, message)

    monkeypatch.setattr(Inbox, "send", too_large)
    stage.fake("good")
    stage.fake("bad")
    stage.start(devices=2)
    assert stage.finish() == "finished"
    assert stage.refusals("bad")[0].startswith(
        "train: no result: its task cannot be sent: a Task message of 70000 bytes"
    )
    assert_moved_by(stage, first, 1.0)


# --- devices that are thought to be away --------------------------------------------------------------


def test_device_that_counts_as_offline_and_sends_is_asked_for_its_hello(stage: Stage, first: Tensors) -> None:
    """A last will of an earlier connection came after the hello of the newer one, from software that numbers none."""
    device = stage.fake("a", silent)
    stage.start()
    stage.drive(lambda: device.tasks() == [1])
    gone = encode(DeviceState(device.instance, online=False))
    device.transport.publish(device.topics.device_state("a"), gone)
    stage.drive(lambda: "a left" in stage.lines)
    welcomes = len(device.got(Welcome))
    honest(device, device.got(Task)[0])
    stage.drive(lambda: len(device.got(Welcome)) > welcomes)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)


def test_last_will_of_an_earlier_connection_is_ignored(stage: Stage) -> None:
    device = stage.fake("a", silent, connection=2)
    stage.start()
    stage.drive(lambda: device.tasks() == [1])
    assert stage.coordinator is not None
    presence = stage.coordinator.state.presence
    assert not presence.state_changed("a", DeviceState(device.instance, online=False, connection=1))
    assert presence.is_online("a")
    assert presence.state_changed("a", DeviceState(device.instance, online=False, connection=2))


# --- a second coordinator -----------------------------------------------------------------------------


def beside(stage: Stage, folder: Path, run: str) -> Stage:
    """Another coordinator at the same broker, for the same devices, with a record of its own."""
    second = Stage(folder, stage._configure, stage._graph_cache)
    second.broker, second.fakes = stage.broker, stage.fakes
    if run != "r":
        with open_record(second.out) as store:
            store.runs.create(run, {})
    second.start(run=run)
    return second


def test_a_second_coordinator_of_a_federation_ends_and_names_the_first(
    stage: Stage, first: Tensors, tmp_path: Path
) -> None:
    device = stage.fake("a", silent)
    stage.start(rounds=2)
    stage.drive(lambda: device.tasks() == [1])
    second = beside(stage, tmp_path / "second", "s")
    ended = second.finish()
    assert isinstance(ended, FederationTaken)
    assert "federation 'home' is served by another coordinator: run 'r' on " in str(ended)
    second.stop()
    device.on_task = honest
    honest(device, device.got(Task)[0])
    assert stage.finish() == "finished"
    assert any("another coordinator (run 's' on " in line for line in stage.lines)
    assert stage.store.devices.read_refusals("r") == [], "no result was dropped for the other's"
    assert_moved_by(stage, first, 2.0)


def test_a_run_that_was_taken_up_elsewhere_is_left_to_the_newer_coordinator(stage: Stage, tmp_path: Path) -> None:
    """The older process hung, or was cut off, and somebody resumed its run."""
    device = stage.fake("a", silent)
    stage.start()
    stage.drive(lambda: device.tasks() == [1])
    second = beside(stage, tmp_path / "second", "r")
    stage.drive(lambda: stage.outcome is not None)
    assert isinstance(stage.outcome, FederationTaken)
    device.on_task = honest
    assert second.finish() == "finished"
    second.stop()


# --- evaluation ---------------------------------------------------------------------------------------


def test_an_evaluation_asks_its_own_cohort(stage: Stage) -> None:
    """Half of the devices test in a round, and others in the next."""
    for name in "abcdefgh":
        stage.fake(name)
    stage.start(devices=8, rounds=3, evaluation_cohort=0.5)
    assert stage.finish() == "finished"
    tested = [stage.accepted(number, "evaluate") for number in (1, 2, 3)]
    assert [len(devices) for devices in tested] == [4, 4, 4]
    assert len({tuple(devices) for devices in tested}) > 1


def test_an_evaluation_closes_by_its_quorum(stage: Stage) -> None:
    for name in ("a", "b", "c"):
        stage.fake(name)
    slow = stage.fake("slow")
    says = slow._on_received

    def deaf_to_evaluations(payload: bytes) -> None:
        """Takes the task and never speaks of it."""
        bring, slow.bring = slow.bring, lambda result: None if result.kind == "evaluate" else bring(result)  # type: ignore[method-assign]
        says(payload)
        slow.bring = bring  # type: ignore[method-assign]

    slow._on_received = deaf_to_evaluations  # type: ignore[method-assign]
    stage.start(devices=4, evaluation_quorum=0.75)
    assert stage.finish() == "finished"
    assert stage.accepted(1, "evaluate") == ["a", "b", "c"]
    assert [cancel.kind for cancel in slow.got(Cancel)] == ["evaluate"]
    assert stage.refusals("slow") == [], "it is not to blame"
    assert [ack.kind for ack in slow.got(ResultAck)] == ["train"]
