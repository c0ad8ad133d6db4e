"""How rounds end: over-selection, stragglers and their late results, mode buffered, declines. As in test_rounds."""

import math
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from coordinator.rounds import deadlines
from coordinator.rounds import uploads as results
from coordinator.rounds.inbox import Interrupted
from coordinator.rounds.status import read_status
from coordinator.rounds.trainer import DeviceTrainer
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import EmptyCohort
from fedvit.resources import ResourceUse
from fedvit.tensors import Tensors
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    Cancel,
    Declined,
    Extended,
    Manifest,
    Progress,
    Result,
    ResultAck,
    Task,
)
from fedvit.wire.transfer import Chunk
from tests.support.runs import Answer, Configure, Fake, Stage, assert_moved_by, honest, silent


def newest(device: Fake, kind: str = "train") -> Task:
    return [task for task in device.got(Task) if task.kind == kind][-1]


def cancelled(device: Fake) -> list[tuple[int, str]]:
    return [(cancel.round, cancel.kind) for cancel in device.got(Cancel)]


def answers(device: Fake) -> None:
    """It brings what it was asked for last."""
    honest(device, newest(device))


# --- over-selection -----------------------------------------------------------------------------------


def test_more_are_asked_than_needed_and_the_first_answers_count(stage: Stage, first: Tensors) -> None:
    """Of five devices a cohort of 0.6 is three, and ceil(1.5 * 3) = 5 are asked. The two that are not needed are told,
    and are to no blame; their round counts the updates 1, 2, 3, whose mean is 2."""
    quick = [stage.fake(name, value=value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    slow = [stage.fake(name, silent, value=1000.0) for name in ("d", "e")]
    stage.start(devices=5, cohort=0.6, over_select=0.5)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 2.0)
    [record] = stage.store.rounds.read_all("r")
    assert (record.cohort, record.needed) == (["a", "b", "c", "d", "e"], 3)
    assert stage.accepted(1) == ["a", "b", "c"]
    for device in slow:
        assert cancelled(device) == [(1, "train")]
        assert stage.refusals(device.name) == []
        assert device.tasks("evaluate") == [1], "they take part in everything else"
    assert all(cancelled(device) == [] for device in quick)
    assert stage.store.tasks.read_unanswered("r") == []


def test_where_fewer_can_be_asked_the_round_needs_those(stage: Stage, first: Tensors) -> None:
    for name in ("a", "b"):
        stage.fake(name)
    stage.start(devices=2, cohort=8, over_select=4.0)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)
    assert [record.needed for record in stage.store.rounds.read_all("r")] == [2]


# --- deadlines ----------------------------------------------------------------------------------------


def test_silent_device_is_given_up_and_active_one_is_awaited(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is predicted of either: the first patience of 0.5 s is over for both, but one says steps meanwhile.

    What it is told reaches farther than what it was told first; the other is told that it is over.
    """
    monkeypatch.setattr(deadlines, "FIRST_S", 0.5)
    monkeypatch.setattr(deadlines, "FLOOR_S", 0.5)
    hung, busy = stage.fake("hung", silent, value=1000.0), stage.fake("busy", silent, samples=10_000)
    stage.start(devices=2, deadline_s="auto", evaluate_every=9)
    stage.drive(lambda: hung.tasks() == busy.tasks() == [1])
    began, steps = time.monotonic(), 0

    def works() -> bool:
        nonlocal steps
        if time.monotonic() - began > 0.1 * (steps + 1):
            steps += 1
            busy.say(Progress("r", 1, "train", steps, 1000, 0.5))
        return bool(hung.got(Cancel)) and time.monotonic() - began > 1.5

    stage.drive(works)
    assert busy.got(Cancel) == []
    assert busy.got(Extended)[0].deadline_s > 0
    assert stage.refusals("hung") == ["train: no result: deadline"]
    answers(busy)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)


def test_device_that_was_killed_has_its_grace_to_return(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away for longer than its deadline had left, and gets its task again in the same round."""
    monkeypatch.setattr(deadlines, "FIRST_S", 0.5)
    monkeypatch.setattr(deadlines, "FLOOR_S", 0.5)
    stage.fake("a", value=1.0)
    killed = stage.fake("killed", silent, value=3.0)
    stage.start(devices=2, deadline_s="auto", evaluate_every=9)
    stage.drive(lambda: killed.tasks() == [1])
    killed.transport.vanish()
    killed.hello = msgspec.structs.replace(killed.hello, instance="another process")
    passed = time.monotonic() + 1.5
    stage.drive(lambda: time.monotonic() > passed)
    killed.on_task = honest
    killed.connect()
    assert stage.finish() == "finished"
    assert killed.tasks() == [1, 1]
    assert_moved_by(stage, first, 2.0)
    assert stage.refusals("killed") == []
    [_, task] = stage.store.tasks.read_histories("r", [1])
    assert (task.device, task.outcome, task.attempt) == ("killed", "accepted", 2)
    assert task.asked_at <= (task.times.left_at or "") < (task.times.returned_at or "")


def test_missing_result_of_a_device_that_left_is_not_for_the_deadline(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device holds the round open, so that the absence of the first alone does not close it."""
    monkeypatch.setattr(deadlines, "FIRST_S", 0.5)
    monkeypatch.setattr(deadlines, "FLOOR_S", 0.5)
    gone, busy = stage.fake("gone", silent), stage.fake("busy", silent, samples=10_000)
    stage.start(devices=2, deadline_s="auto", rejoin_grace_s=0.5, evaluate_every=9)
    stage.drive(lambda: gone.tasks() == busy.tasks() == [1])
    stage.fakes.remove(gone)
    gone.transport.vanish()
    steps = 0

    def is_given_up() -> bool:
        nonlocal steps
        steps += 1
        busy.say(Progress("r", 1, "train", steps, 10**6, 0.5))
        return bool(stage.refusals("gone"))

    stage.drive(is_given_up)
    answers(busy)
    assert stage.finish() == "finished"
    assert stage.refusals("gone") == ["train: no result: offline"]
    [_, task] = stage.store.tasks.read_histories("r", [1])
    assert (task.device, task.outcome, task.times.returned_at) == ("gone", "offline", None)
    assert any("train closed without gone (offline)" in line for line in stage.lines)


def test_however_alive_a_device_is_there_is_a_limit(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.fake("a")
    busy = stage.fake("busy", silent)
    stage.start(devices=2, deadline_s="auto", deadline_limit_s=1.0, evaluate_every=9)
    stage.drive(lambda: busy.tasks() == [1])
    steps = 0

    def works() -> bool:
        nonlocal steps
        steps += 1
        busy.say(Progress("r", 1, "train", steps, 10**6, 0.5))
        return bool(busy.got(Cancel))

    stage.drive(works)
    assert stage.finish() == "finished"
    assert stage.refusals("busy") == ["train: no result: deadline"]
    assert_moved_by(stage, first, 1.0)


# --- devices that hold a round open -------------------------------------------------------------------

CHUNKS = 50


def hold(stage: Stage, on_task: Answer = silent) -> tuple[Fake, deadlines.Deadline]:
    """A device of which nothing is predicted is all that round 1 still waits for, and until when."""
    stage.fake("a")
    holder = stage.fake("holder", on_task)
    holder.serves = False
    stage.start(devices=2, evaluate_every=9, deadline_s="auto")
    stage.drive(lambda: stage.accepted(1) == ["a"] and holder.tasks() == [1])
    return holder, deadline_of(stage, holder)


def deadline_of(stage: Stage, device: Fake) -> deadlines.Deadline:
    assert stage.coordinator is not None
    assignment = stage.coordinator.state.tasks.of(device.name)
    assert assignment is not None
    return assignment.deadline


def end_in(stage: Stage, device: Fake, seconds: float) -> None:
    """Its deadline is so near."""
    assert stage.coordinator is not None
    task = stage.coordinator.state.tasks.of(device.name)
    assert task is not None
    task.deadline.at = time.monotonic() + seconds
    stage.coordinator.scheduler.schedule_check(task)


def is_given_up(stage: Stage, holder: Fake, first: Tensors) -> None:
    assert stage.finish() == "finished"
    assert "train: no result: deadline" in stage.refusals("holder")
    assert holder.got(Cancel)[0].reason == "late: round 1 no longer waits for it"
    assert_moved_by(stage, first, 1.0)


def announced(device: Fake, task: Task) -> Result:
    """A result with an upload of many small chunks, which the device does not have."""
    upload = Manifest(digest_of(device.name.encode()), CHUNKS * 1024, 1024)
    return Result(task.run, task.round, "train", device.hello.train_samples, {}, ResourceUse(), upload)


def send_chunk(device: Fake, index: int, seq: int) -> None:
    digest = digest_of(device.name.encode())
    chunk = Chunk(digest, index, CHUNKS, CHUNKS * 1024, seq, bytes(1024))
    device.transport.publish(device.topics.upload(device.name, digest), chunk.encode())


@pytest.mark.parametrize("late", ["refuse", "use"])
def test_upload_that_never_comes_does_not_block_others(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """One upload at a time, and the first device announces one and sends nothing. Its deadline is far away."""
    monkeypatch.setattr(results, "CHUNKS_AT_ONCE", 1)
    a, mute = stage.fake("a", silent), stage.fake("mute", lambda device, task: device.say(announced(device, task)))
    mute.serves = False
    stage.start(devices=2, evaluate_every=9, late=late, deadline_s=3600.0, max_staleness=0)
    stage.drive(lambda: bool(mute.got(BlobNack)) and bool(a.tasks()))
    answers(a)
    deadline = deadline_of(stage, mute)
    stage.drive(lambda: deadline.upload_until < math.inf)
    assert deadline.upload_until <= time.monotonic() + deadlines.UPLOAD_S
    assert a.got(BlobNack) == [], "it is not its turn"
    deadline.upload_until = time.monotonic()
    stage.drive(lambda: a.answers() == [(1, True)])
    assert stage.finish() == "finished"
    assert stage.refusals("mute")[0] == "train: no result: deadline"
    assert "no longer waits for it" in mute.reasons()[0]
    assert_moved_by(stage, first, 1.0)


@pytest.mark.parametrize("fresh", [True, False], ids=["new chunks", "the same chunk"])
def test_an_upload_that_trickles_is_given_up(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Chunks keep coming, but more slowly than over the slowest link: none buys as much time as it takes."""
    holder, deadline = hold(stage, lambda device, task: device.say(announced(device, task)))
    stage.drive(lambda: deadline.upload_until < math.inf and bool(holder.got(BlobNack)))
    if fresh:
        monkeypatch.setattr(deadlines, "SLOWEST_LINK_BYTES_PER_S", 1e9)
    deadline.upload_until = time.monotonic() + 1.0
    began, sent = time.monotonic(), 0

    def trickles() -> bool:
        nonlocal sent
        if time.monotonic() - began > 0.1 * sent and sent < CHUNKS - 1:
            send_chunk(holder, sent if fresh else 0, sent + 1)
            sent += 1
        return bool(holder.got(Cancel))

    stage.drive(trickles)
    is_given_up(stage, holder, first)


def test_an_upload_over_a_slow_link_is_waited_for(stage: Stage) -> None:
    """Each chunk buys what the slowest link needs for it, and there is no limit to them but the upload's size."""
    holder, deadline = hold(stage, lambda device, task: device.say(announced(device, task)))
    stage.drive(lambda: deadline.upload_until < math.inf and bool(holder.got(BlobNack)))
    before = deadline.upload_until
    for index in range(CHUNKS - 1):
        send_chunk(holder, index, index + 1)
    bought_s = (CHUNKS - 1) * 1024 / deadlines.SLOWEST_LINK_BYTES_PER_S
    stage.drive(lambda: deadline.upload_until >= before + bought_s - 1e-6)
    assert holder.got(Cancel) == []
    holder.transport.vanish()
    stage.drive(lambda: deadline.upload_until == math.inf)  # while it is away this does not count


def test_steps_that_a_device_cannot_have_hold_no_round(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten images are a few steps; after those a device that says ever more of them is not waited for."""
    holder, _ = hold(stage)
    steps = 0

    def works() -> bool:
        nonlocal steps
        steps += 1
        holder.say(Progress("r", 1, "train", steps, 2**31 - 1, 0.5))
        return bool(holder.got(Cancel))

    with monkeypatch.context() as patched:
        for patience in ("FIRST_S", "FLOOR_S"):
            patched.setattr(deadlines, patience, 0.5)
        end_in(stage, holder, 0.5)
        stage.drive(works)
    is_given_up(stage, holder, first)


def test_request_for_the_same_bytes_again_holds_no_round(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fetches what it was offered, and what it was not, for ever."""
    holder, _ = hold(stage)
    offered = newest(holder).blobs

    def asks() -> bool:
        for manifest in offered:
            holder.say(BlobNack(manifest.digest, ((0, manifest.chunks),)))
            holder.say(BlobNack(manifest.digest, ((1, manifest.chunks),)))  # beyond its end
            holder.say(BlobAck(manifest.digest))
        holder.say(BlobNack(digest_of(b"of another device"), ((0, 1),)))
        return bool(holder.got(Cancel))

    with monkeypatch.context() as patched:
        for patience in ("FIRST_S", "FLOOR_S"):
            patched.setattr(deadlines, patience, 0.5)
        end_in(stage, holder, 0.5)
        stage.drive(asks)
    is_given_up(stage, holder, first)


def test_nobody_may_request_what_a_closed_round_has_removed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a late request looks like a damaged file, and a few of them end the run."""
    delete, removed, still_offered = BlobStore.delete, list[Path](), list[Path]()

    def look(files: list[tuple[Path, int]]) -> int:
        assert stage.coordinator is not None
        state = stage.coordinator.state
        removed.extend(file for file, _ in files)
        still_offered.extend({file for file, _ in files} & set(map(state.blobs.path, state.tasks.offered("a"))))
        return delete(files)

    monkeypatch.setattr(BlobStore, "delete", staticmethod(look))
    stage.fake("a")
    stage.start(devices=1, rounds=2, evaluate_every=9)
    assert stage.finish() == "finished"
    assert removed
    assert still_offered == []


def test_what_is_waited_for_is_in_a_file(stage: Stage) -> None:
    stage.fake("a")
    slow = stage.fake("slow", silent)
    stage.start(devices=2)
    stage.drive(lambda: stage.accepted(1) == ["a"] and slow.tasks() == [1])
    slow.say(Progress("r", 1, "train", 3, 40, 0.5))

    def told() -> bool:
        status = read_status(stage.out / "r")
        return [(one.device, one.done_steps, one.total_steps) for one in status.waiting_for] == [("slow", 3, 40)]

    stage.drive(told)
    status = read_status(stage.out / "r")
    [one] = status.waiting_for
    assert (one.round, one.kind, one.state) == (1, "train", "working")
    assert one.since < one.until
    assert status.doing == "round 1/1: train"
    assert status.online == 2
    assert not status.is_stale()


# --- late results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "weight"), [("use", 1.0), ("discount", 2**-0.5)])
def test_a_late_result_counts_once_in_the_round_that_is_open_then(
    stage: Stage, first: Tensors, late: str, weight: float
) -> None:
    """Round 1 closes with a's update of 1. In round 2 a brings 1 and the straggler its update of 8 of round 1: equal
    sizes, so (1 + weight * 8) / 2 in that round; said again, it changes nothing. It is asked again in round 3."""
    a, slow = stage.fake("a"), stage.fake("slow", silent, value=8.0)
    stage.start(devices=2, rounds=3, quorum=0.5, late=late, evaluate_every=9)
    stage.drive(lambda: a.tasks() == [1, 2] or (stage.accepted(1) == ["a"] and slow.tasks() == [1]))
    a.on_task = silent
    stage.drive(lambda: len(a.tasks()) >= 2)
    number = a.tasks()[-1]
    assert slow.tasks() == [1], "who is at work is not asked"
    result = slow.answer(newest(slow))
    slow.bring(result)
    stage.drive(lambda: slow.answers() == [(1, True)])
    slow.bring(result)
    stage.drive(lambda: slow.answers() == [(1, True), (1, True)])
    slow.value = 1.0
    slow.on_task = a.on_task = honest
    answers(a)
    assert stage.finish() == "finished"
    used = {(entry.device, entry.round): entry.used_in for entry in stage.store.tasks.read_results("r", kind="train")}
    assert used["slow", 1] == number
    # in the last round either of the two may come too late for the other
    assert [entry for entry in stage.store.devices.read_refusals("r") if entry.round != 3] == []
    staleness = number - 1
    step = (1 + (1.0 if late == "use" else (1 + staleness) ** -0.5) * 8.0) / 2
    assert weight == (1.0 if late == "use" else (1 + staleness) ** -0.5)
    assert_moved_by(stage, first, 1.0 + step + 1.0)
    figures = [record.figures["late"] for record in stage.store.rounds.read_all("r")]
    assert sum(figures) == 1
    assert figures[number - 1] == 1


def test_too_late_is_refused(stage: Stage, first: Tensors) -> None:
    """One round late is allowed; it comes in round 3."""
    a, slow = stage.fake("a"), stage.fake("slow", silent, value=1000.0)
    a.on_task = lambda device, task: honest(device, task) if task.round < 3 else None
    stage.start(devices=2, rounds=3, quorum=0.5, late="use", max_staleness=1, evaluate_every=9)
    stage.drive(lambda: a.tasks() == [1, 2, 3])
    answers(slow)
    stage.drive(lambda: slow.answers() == [(1, False)])
    assert "made for round 1, 2 rounds ago; at most 1 are allowed" in slow.reasons()[0]
    answers(a)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 3.0)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_straggler_keeps_its_task_when_the_coordinator_is_started_again(
    stage: Stage, first: Tensors, meanwhile: bool
) -> None:
    """Its result of round 1 counts in round 2, which another process opened; also if it was done while none ran."""
    a, slow = stage.fake("a"), stage.fake("slow", silent, value=3.0)
    a.on_task = lambda device, task: honest(device, task) if task.round == 1 else None
    settings = {"devices": 2, "rounds": 2, "quorum": 0.5, "late": "use", "evaluate_every": 9, "rejoin_grace_s": 600.0}
    stage.start(**settings)
    stage.drive(lambda: a.tasks() == [1, 2] and slow.tasks() == [1])
    stage.stop()
    if meanwhile:
        answers(slow)
    stage.start(**settings, resume=True)
    stage.drive(lambda: bool(slow.answers()) or (slow.tasks() == [1, 1] and a.tasks() == [1, 2, 2]))
    if not meanwhile:
        answers(slow)
    stage.drive(lambda: bool(slow.answers()) and a.tasks() == [1, 2, 2])
    assert slow.answers() == [(1, True)]
    answers(a)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0 + (1.0 + 3.0) / 2)


def test_no_task_continues_after_the_last_round(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator ends between the last round and the end of its stragglers, which the next one evaluates."""
    stage.fake("a")
    slow = stage.fake("slow", silent)
    settings = {"devices": 2, "rounds": 1, "quorum": 0.5, "late": "use"}
    with monkeypatch.context() as ended:
        ended.setattr(DeviceTrainer, "dismiss", lambda trainer: stage.coordinator and stage.coordinator.stop())
        stage.start(**settings)
        assert isinstance(stage.finish(), Interrupted)
    stage.stop()
    stage.start(**settings, resume=True)
    assert stage.finish() == "finished"
    assert slow.tasks() == [1]
    assert stage.accepted(1, "evaluate") == ["a", "slow"]


# --- mode buffered ------------------------------------------------------------------------------------


def test_a_buffer_of_results_makes_a_round_and_stale_ones_weigh_less(stage: Stage, first: Tensors) -> None:
    """Three devices of equal size, a buffer of two. Round 1: a and b bring 2 and 4, mean 3. Round 2: a again 2, and c
    what it was asked in round 1, 8 / sqrt(2): together (2 + 8 / sqrt(2)) / 2. b is at work meanwhile, and is told that
    it can stop."""
    a, b = stage.fake("a", value=2.0), stage.fake("b", silent, value=4.0)
    c = stage.fake("c", silent, value=8.0)
    a.on_task = lambda device, task: honest(device, task) if task.round == 1 else None
    stage.start(devices=3, mode="buffered", buffer=2, rounds=2, evaluate_every=9)
    stage.drive(lambda: a.tasks() == b.tasks() == c.tasks() == [1] and a.answers() == [(1, True)])
    answers(b)
    stage.drive(lambda: a.tasks() == b.tasks() == [1, 2])
    assert c.tasks() == [1], "it is at work"
    answers(c)
    stage.drive(lambda: c.answers() == [(1, True)])
    answers(a)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 3.0 + (2.0 + 8.0 * 2**-0.5) / 2)
    assert cancelled(b) == [(2, "train")]
    records = stage.store.rounds.read_all("r")
    assert [record.figures["accepted"] for record in records] == [2, 2]
    assert [record.figures["late"] for record in records] == [0, 1]
    assert [device.tasks("evaluate") for device in (a, b, c)] == [[2]] * 3
    assert stage.store.devices.read_refusals("r") == []


def test_no_more_work_at_a_time_than_they_may_and_fairly_in_turn(stage: Stage) -> None:
    """Four devices, two at a time, a buffer of one: after two rounds all four were asked."""
    devices = [stage.fake(name, silent) for name in ("a", "b", "c", "d")]
    stage.start(devices=4, mode="buffered", buffer=1, concurrency=2, rounds=4, selection="fair", evaluate_every=9)

    def at_work() -> list[Fake]:
        return [device for device in devices if len(device.tasks()) > len(device.answers())]

    def count(of: str) -> int:
        return sum(len(getattr(device, of)()) for device in devices)

    for done in range(3):
        stage.drive(lambda done=done: len(at_work()) == 2 and count("tasks") == done + 2)  # type: ignore[misc]
        answers(at_work()[0])
        stage.drive(lambda done=done: count("answers") == done + 1)  # type: ignore[misc]
    stage.drive(lambda: count("tasks") == 5)
    assert all(device.tasks() for device in devices)
    for device in at_work():
        device.on_task = honest
        answers(device)
    assert stage.finish() == "finished"


def test_buffer_that_cannot_be_filled_is_used_as_it_is(stage: Stage, first: Tensors) -> None:
    """Two devices, a buffer of four, and each counts once a round."""
    a, b = stage.fake("a", value=1.0), stage.fake("b", value=3.0)
    stage.start(devices=2, mode="buffered", buffer=4, rounds=2, evaluate_every=1)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 4.0)
    assert a.tasks() == b.tasks() == [1, 2]
    assert a.tasks("evaluate") == b.tasks("evaluate") == [1, 2]


def test_evaluation_waits_for_working_devices_and_none_trains_meanwhile(stage: Stage) -> None:
    a, b = stage.fake("a"), stage.fake("b", silent)
    stage.start(devices=2, mode="buffered", buffer=1, rounds=2, evaluate_every=1)
    stage.drive(lambda: a.tasks("evaluate") == [1])
    assert (b.tasks("evaluate"), a.tasks()) == ([], [1])
    answers(b)
    stage.drive(lambda: b.tasks("evaluate") == [1])
    b.on_task = honest
    assert stage.finish() == "finished"
    assert stage.accepted(1, "evaluate") == ["a", "b"]
    assert {(entry.device, entry.used_in) for entry in stage.store.tasks.read_results("r", kind="train")} >= {
        ("a", 1),
        ("b", 2),
    }


def test_evaluation_that_has_its_quorum_ends_no_training(stage: Stage, first: Tensors) -> None:
    """Round 1 is a's update of 1; b was asked in it, and its 3 counts in round 2, at a weight of 1 / sqrt(2)."""
    a, b = stage.fake("a"), stage.fake("b", silent, value=3.0)
    a.on_task = lambda device, task: honest(device, task) if task.round == 1 else None
    stage.start(devices=2, mode="buffered", buffer=1, rounds=2, evaluate_every=1, evaluation_quorum=0.5)
    stage.drive(lambda: a.tasks() == [1, 2])
    assert (cancelled(b), b.tasks()) == ([], [1])
    answers(b)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0 + 3.0 * 2**-0.5)


def test_buffered_run_continues_after_a_kill(
    tmp_path: Path, configure: Configure, graph_cache: Path, first: Tensors
) -> None:
    """Killed in round 2 with one of two results in and c at work for round 1: the end is the same as without."""
    stage = Stage(tmp_path / "broken", configure, graph_cache)
    a, b = stage.fake("a", silent, value=2.0), stage.fake("b", silent, value=4.0)
    c = stage.fake("c", silent, value=8.0)
    settings = {"devices": 3, "mode": "buffered", "buffer": 2, "rounds": 2, "evaluate_every": 9}
    stage.start(**settings)
    stage.drive(lambda: a.tasks() == b.tasks() == c.tasks() == [1])
    answers(a)
    answers(b)
    stage.drive(lambda: a.tasks() == b.tasks() == [1, 2])
    answers(a)
    stage.drive(lambda: a.answers() == [(1, True), (2, True)])
    shutil.copytree(stage.out, tmp_path / "left")
    stage.stop()
    shutil.rmtree(stage.out)
    shutil.move(tmp_path / "left", stage.out)
    stage.start(**settings, resume=True)
    stage.drive(lambda: c.tasks() == [1, 1] and b.tasks() == [1, 2, 2])
    assert newest(c).groups == c.got(Task)[0].groups, "it goes on with what it had"
    answers(c)
    assert stage.finish() == "finished"
    assert a.tasks() == [1, 2]
    assert_moved_by(stage, first, 3.0 + (2.0 + 8.0 * 2**-0.5) / 2)
    stage.stop()


# --- declines -----------------------------------------------------------------------------------------


def declines(again_s: float) -> Answer:
    def decline(device: Fake, task: Task) -> None:
        device.say(Declined(task.run, task.round, task.kind, "hot: 81 C", again_s))

    return decline


def test_a_device_that_declines_is_left_out_without_blame(stage: Stage, first: Tensors) -> None:
    """For an hour: both rounds close without it, and it is asked no more. The next test has one that is asked again."""
    a, hot = stage.fake("a"), stage.fake("hot", declines(3600.0))
    stage.start(devices=2, rounds=2, evaluate_every=9)
    stage.drive(lambda: a.tasks() == [1, 2])
    assert hot.tasks() == [1]
    assert hot.answers() == [(1, False)], "it repeats what is not answered"
    assert stage.refusals("hot") == ["declined: hot: 81 C; asked again in 3600 s"]
    assert stage.finish() == "finished"
    assert [record.figures["declined"] for record in stage.store.rounds.read_all("r")] == [1, 0]
    assert stage.accepted(1) == ["a"]
    assert_moved_by(stage, first, 2.0)


def test_a_round_that_all_decline_waits_for_them(stage: Stage, first: Tensors) -> None:
    """Four times, which is more often than a round may be fruitless."""
    device = stage.fake("a")
    decline = declines(0.05)

    def at_last(device: Fake, task: Task) -> None:
        (honest if len(device.tasks()) > 4 else decline)(device, task)

    device.on_task = at_last
    stage.start()
    outcome = stage.finish()
    assert not isinstance(outcome, EmptyCohort)
    assert outcome == "finished"
    assert device.tasks() == [1] * 5
    assert_moved_by(stage, first, 1.0)


def test_decline_of_an_unknown_task_changes_nothing(stage: Stage, first: Tensors) -> None:
    def astray(device: Fake, task: Task) -> None:
        device.say(Declined("yesterday", 1, "train", "busy", 60.0))
        device.say(Declined(task.run, 7, "train", "busy", 60.0))
        honest(device, task)

    device = stage.fake("a", astray)
    stage.start(rounds=2)
    assert stage.finish() == "finished"
    assert stage.store.devices.read_refusals("r") == []
    assert [(ack.run, ack.round) for ack in device.got(ResultAck) if not ack.accepted] == [
        ("yesterday", 1),
        ("r", 7),
        ("yesterday", 1),
        ("r", 7),
    ]
    assert_moved_by(stage, first, 2.0)
