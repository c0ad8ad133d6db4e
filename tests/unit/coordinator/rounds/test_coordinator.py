"""Whole runs over the memory transport: the coordinator is real, the devices do what the test wants of them."""

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from coordinator.compute.planning.planner import PROTOCOLS
from coordinator.config import make_config, read_toml
from coordinator.record.copies import COPIES
from coordinator.record.record import open_record
from coordinator.record.tables import RoundRecord
from coordinator.rounds import pausing
from coordinator.rounds import uploads as results_module
from coordinator.rounds import validation as admission_module
from coordinator.rounds.cohort import select_uniform
from coordinator.rounds.coordinator import Cancelled
from coordinator.rounds.display import DeviceLine
from coordinator.rounds.engine import ATTEMPTS
from coordinator.rounds.journal import RecordJournal
from coordinator.rounds.membership import MAX_CLASS_LISTS
from coordinator.rounds.reporter import view
from coordinator.rounds.status import read_status
from fedvit.blobs import BlobStore, digest_of
from fedvit.errors import ConfigError, EmptyCohort, NoRoom, StorageFailed
from fedvit.methods.generators.base import drawing
from fedvit.program import Program
from fedvit.tensors import Tensors, pack, unpack
from fedvit.transport import blob_receiver, chunk_sender
from fedvit.transport.base import Received
from fedvit.transport.memory import MemoryTransport
from fedvit.wire.messages import (
    INLINE_BYTES,
    BlobNack,
    CoordinatorState,
    DeviceState,
    Failed,
    Manifest,
    Progress,
    Refused,
    ResultAck,
    RunEnded,
    Task,
    Welcome,
    encode,
    encode_class_list,
)
from fedvit.wire.topics import Topics
from tests.support.runs import CLASSES, Answer, Configure, Fake, Stage, assert_moved_by, by_round, honest, silent
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.usefixtures("known")

# --- rounds as they should be -------------------------------------------------------------------------


def test_updates_are_weighed_by_samples(stage: Stage, first: Tensors) -> None:
    """Sizes 1 and 3, updates 0 and 4: (1 * 0 + 3 * 4) / 4 = 3 in each of two rounds, 6 in all.

    Right answers 5 of 5 and 5 of 5; and the run's record is complete.
    """
    a, b = stage.fake("a", samples=1, value=0.0), stage.fake("b", samples=3, value=4.0)
    stage.start(devices=2, rounds=2)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 6.0)
    for device in (a, b):
        assert [(task.kind, task.round) for task in device.got(Task)] == [
            ("train", 1), ("evaluate", 1), ("train", 2), ("evaluate", 2),
        ]  # fmt: skip
        assert all(ack.accepted for ack in device.got(ResultAck))
        assert device.got(RunEnded) == [RunEnded("r", "finished")]
        assert not device.got(CoordinatorState)[-1].alive
    record = stage.store.runs.read("r")
    assert (record.status, record.classes, record.reason) == ("finished", CLASSES, None)
    assert [(entry.round, entry.cohort, entry.evaluated) for entry in stage.store.rounds.read_all("r")] == [
        (1, ["a", "b"], True),
        (2, ["a", "b"], True),
    ]
    assert stage.accepted(1) == stage.accepted(2) == stage.accepted(1, "evaluate") == ["a", "b"]
    assert stage.store.devices.read_refusals("r") == []
    [task, *_] = a.got(Task)
    assert (task.run, task.seed, task.lr_scale, set(task.groups)) == ("r", 0, 1.0, {"model"})
    assert {manifest.digest for manifest in task.blobs} >= {task.program, *task.groups.values()}
    assert {task.groups["model"] for task in a.got(Task)} != {task.groups["model"]}, "each round has its own"


def test_small_blobs_come_and_go_inside_messages(stage: Stage, first: Tensors) -> None:
    """Updates of 2 that nobody fetched; what a task brings along is what its groups name."""

    def inside(device: Fake, task: Task) -> None:
        result = device.answer(task)
        assert result.upload is not None
        device.bring(msgspec.structs.replace(result, inline=device.blobs.get(result.upload.digest)))

    device = stage.fake("a", inside, value=2.0)
    device.serves = False
    stage.start()
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 2.0)
    [task, *_] = device.got(Task)
    small = {digest for digest in task.groups.values() if stage_manifest(task, digest).size <= INLINE_BYTES}
    assert {digest_of(content) for content in task.inline} == small
    assert not device.got(BlobNack)


def stage_manifest(task: Task, digest: str) -> Manifest:
    return next(manifest for manifest in task.blobs if manifest.digest == digest)


@pytest.mark.parametrize("good", [True, False])
def test_large_upload_is_looked_at_while_results_of_others_are_taken(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    """Every upload counts as large here; b's comes inside its result. That of a is looked at until b's was accepted."""
    taken, check = threading.Event(), results_module.check_upload

    def slow(upload: Path | bytes, program: Program, what: str) -> Tensors:
        if isinstance(upload, Path):
            assert taken.wait(WAIT_S / 2), "the result of b was not taken"
        return check(upload, program, what)

    def inside(device: Fake, task: Task) -> None:
        result = device.answer(task)
        assert result.upload is not None
        device.bring(msgspec.structs.replace(result, inline=device.blobs.get(result.upload.digest)))

    monkeypatch.setattr(results_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(results_module, "check_upload", slow)
    a, b = stage.fake("a", value=1.0 if good else float("nan")), stage.fake("b", inside)
    stage.start(devices=2)
    stage.drive(lambda: b.answers() == [(1, True)])
    assert a.answers() == []
    taken.set()
    assert stage.finish() == "finished"
    assert a.answers() == [(1, good)]
    assert stage.accepted(1) == (["a", "b"] if good else ["b"])


def test_an_upload_inside_a_result_must_be_the_one_it_names(stage: Stage) -> None:
    def wrong(device: Fake, task: Task) -> None:
        device.bring(msgspec.structs.replace(device.answer(task), inline=b"something else"))

    stage.fake("a", wrong)
    b = stage.fake("b")
    stage.start(devices=2)
    assert stage.finish() == "finished"
    [refusal] = stage.refusals("a")
    assert "the upload of 14 bytes has digest" in refusal
    assert b.answers() == [(1, True)]


def test_an_upload_for_which_there_is_no_room_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device says so much that the disk would be full: it is told so, nothing is fetched, and the round goes on."""
    large = stage.fake("a", claimed(upload=Manifest(digest_of(b"x"), 20_000, 1024)))
    stage.fake("b")
    monkeypatch.setattr(results_module, "free_disk_bytes", lambda folder: 10_000)
    monkeypatch.setattr(admission_module, "MIN_FREE_BYTES", 0)
    stage.start(devices=2)
    assert stage.finish() == "finished"
    assert "an upload of 20000 bytes (20 kB), the coordinator has 10 kB free" in stage.refusals("a")[0]
    assert any("the coordinator has" in reason for reason in large.reasons())
    assert not large.got(BlobNack)
    assert stage.accepted(1) == ["b"]


def test_old_blobs_are_deleted(stage: Stage) -> None:
    """After three rounds: the program, three graphs, and the newest tensors; nothing of the rounds before."""
    device = stage.fake("a")
    stage.start(rounds=3, backup_every=0)
    stage.finish()
    last = device.got(Task)[-1]
    kept = {path.name for path in (stage.out / "r" / "blobs").glob("*/*")}
    wanted = {last.program, last.groups["model"], *(manifest.digest for manifest in last.blobs)}
    assert kept == {digest.partition(":")[2] for digest in wanted}
    assert len(kept) == 5


def test_a_round_more_is_kept_than_its_copy_of_the_record_needs(stage: Stage) -> None:
    """The tensors of the round before, and the upload that moved them."""
    stage.fake("a")
    stage.start(rounds=3)
    stage.finish()
    kept = {path.name for path in (stage.out / "r" / "blobs").glob("*/*")}
    _, second, third = stage.store.rounds.read_all("r")
    assert second.state
    assert third.state
    [upload] = [result.upload for result in stage.store.tasks.read_results("r", 3, "train")]
    needed = {second.state.groups["model"], third.state.groups["model"], upload}
    assert kept >= {str(digest).partition(":")[2] for digest in needed}
    assert len(kept) == 5 + 2


def test_only_the_cohort_is_asked_and_everybody_is_evaluated(stage: Stage, first: Tensors) -> None:
    """One of three per round; each update is 1. A result of somebody who was not asked is refused."""
    fakes = [stage.fake(name) for name in ("a", "b", "c")]
    stage.start(devices=3, rounds=4, cohort=1)
    stage.drive(lambda: any(device.tasks() for device in fakes))
    [task] = [device.got(Task)[0] for device in fakes if device.tasks()]
    outsider = next(device for device in fakes if not device.tasks())
    asked = next(device for device in fakes if device.tasks())
    asked_first = asked.name
    outsider.bring(outsider.answer(task))
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 4.0)
    cohorts = [entry.cohort for entry in stage.store.rounds.read_all("r")]
    assert cohorts[0] == [asked_first]
    assert all(len(cohort) == 1 for cohort in cohorts)
    for device in fakes:
        assert device.tasks() == [number + 1 for number, cohort in enumerate(cohorts) if cohort == [device.name]]
        assert device.tasks("evaluate") == [1, 2, 3, 4]
    assert (1, False) in outsider.answers()
    [refusal] = stage.refusals(outsider.name)
    assert "was not asked in round 1" in refusal or "late: round 1" in refusal


def test_evaluation_every_few_rounds_and_after_the_last(stage: Stage) -> None:
    device = stage.fake("a")
    stage.start(rounds=5, evaluate_every=2)
    stage.finish()
    assert device.tasks() == [1, 2, 3, 4, 5]
    assert device.tasks("evaluate") == [2, 4, 5]


def test_classes_are_those_of_the_first_devices(stage: Stage) -> None:
    """A device that comes later with a class more is refused for good, and told which."""
    stage.fake("a", silent, classes=("1", "0"))
    stage.fake("b", silent, classes=("2",))
    stage.start(devices=2, classes=())
    stage.drive(lambda: bool(stage.fakes[0].tasks()))
    assert stage.store.runs.read("r").classes == CLASSES
    late = stage.fake("late", classes=("0", "7"))
    stage.drive(lambda: bool(late.got(Refused)))
    refused = late.got(Refused)[0]
    assert (refused.instance, refused.final) == (late.instance, True)
    assert refused.reason == "its class folder '7' is not among this run's 3 classes: 0, 1, 2"
    [said] = [line for line in stage.lines if line.startswith("the run has")]
    assert said.startswith("the run has 3 classes: '0', '1', '2', as announced by 'a', 'b'; set `classes` in the")
    assert set(stage.refusals("late")) == {f"hello: {refused.reason}"}
    assert f"late was refused: {refused.reason}" in stage.lines
    assert late.got(Task) == []


def test_class_folders_that_are_empty_everywhere_are_named_and_left_out(stage: Stage) -> None:
    """A folder that another device fills is a class."""
    stage.fake("a", silent, classes=("0", "1"))
    stage.fake("b", silent, classes=("2",))
    for fake, empty in zip(stage.fakes, (("2", "horse"), ("horse", "cow")), strict=True):
        fake.hello = msgspec.structs.replace(fake.hello, empty_folders=empty)
    stage.start(devices=2, classes=())
    stage.drive(lambda: bool(stage.fakes[0].tasks()))
    assert stage.store.runs.read("r").classes == CLASSES
    assert "class folders without an image on any device, not of this run: 'cow', 'horse'" in stage.lines


def test_classes_that_differ_in_case_alone_are_pointed_out(stage: Stage) -> None:
    stage.fake("a", silent, classes=("deer", "frog"))
    stage.fake("b", silent, classes=("Deer",))
    stage.start(devices=2, classes=())
    stage.drive(lambda: bool(stage.fakes[0].tasks()))
    assert "warning: 'Deer', 'deer' differ only in upper and lower case, and are different classes" in stage.lines


def test_first_device_cannot_announce_thousands_of_classes(stage: Stage, first: Tensors) -> None:
    """It is told what the bound is and who can raise it, and the run is that of the next device."""
    flood = stage.fake("flood", classes=tuple(map(str, range(8000))))
    stage.start(classes=(), max_classes=3)
    stage.drive(lambda: bool(flood.got(Refused)))
    refused = flood.got(Refused)[0]
    assert refused.final
    assert refused.reason == (
        "it has 8000 class folders, and this run allows 3 from devices; its operator can list `classes`, "
        "or raise `max_classes`"
    )
    stage.fake("a")
    assert stage.finish() == "finished"
    assert stage.store.runs.read("r").classes == CLASSES
    assert stage.refusals("flood") == [f"hello: {refused.reason}"]
    assert_moved_by(stage, first, 1.0)


def with_class_list(device: Fake, content: bytes, **changed: Any) -> None:
    """The device announces its classes as a blob with this content; `changed` is what it says of the blob instead."""
    described = msgspec.structs.replace(device.blobs.put(content), **changed)
    device.hello = msgspec.structs.replace(device.hello, classes=(), class_list=described)


def test_classes_that_do_not_fit_into_a_hello_are_fetched(stage: Stage, first: Tensors) -> None:
    device = stage.fake("a")
    with_class_list(device, encode_class_list(CLASSES))
    stage.start(classes=())
    assert stage.finish() == "finished"
    assert stage.store.runs.read("r").classes == CLASSES
    assert_moved_by(stage, first, 1.0)


def test_classes_that_are_fetched_are_checked_like_others(stage: Stage) -> None:
    flood = stage.fake("flood")
    with_class_list(flood, encode_class_list(tuple(map(str, range(8000)))))
    stage.start(classes=(), max_classes=3)
    stage.drive(lambda: bool(flood.got(Refused)))
    assert flood.got(Refused)[0].reason.startswith("it has 8000 class folders, and this run allows 3 from devices")


@pytest.mark.parametrize(
    ("content", "changed", "reason"),
    [
        (b"\xc1", {}, "its list of classes: a list of classes of 1 bytes cannot be read"),
        (b"x", {"size": 2**21}, "its list of classes has 2097152 bytes, at most 1048576 are allowed"),
        (
            b"x",
            {"digest": "../../etc/passwd"},
            "the name '../../etc/passwd' of its list of classes is not a blake3 digest",
        ),
    ],
)
def test_class_list_that_is_none_is_refused(stage: Stage, content: bytes, changed: dict[str, Any], reason: str) -> None:
    device = stage.fake("a")
    with_class_list(device, content, **changed)
    stage.start(classes=())
    stage.drive(lambda: bool(device.got(Refused)))
    assert device.got(Refused)[0].final
    assert device.got(Refused)[0].reason.startswith(reason)


def test_class_lists_of_one_device_are_bounded(stage: Stage) -> None:
    """Each is another blob on the coordinator's disk."""
    device = stage.fake("a")
    stage.start(classes=(), max_classes=2)
    for number in range(MAX_CLASS_LISTS + 1):
        with_class_list(device, encode_class_list((str(number), "x", "y")))
        device.say(device.hello)
        stage.drive(lambda: len(device.got(Refused)) > number)  # noqa: B023 - it is called here
    assert device.got(Refused)[-2].reason.startswith("it has 3 class folders")
    assert device.got(Refused)[-1].reason == "it has sent 10 different lists of classes already"


def test_classes_of_all_devices_together_are_bounded(stage: Stage) -> None:
    stage.fake("a", silent, classes=("0", "1"))
    stage.start(classes=(), max_classes=3, devices=2)
    stage.drive(lambda: bool(stage.fakes[0].got(Welcome)))
    second = stage.fake("b", silent, classes=("2", "3"))
    stage.drive(lambda: bool(second.got(Refused)))
    assert second.got(Refused)[0].reason.startswith(
        "it has 2 class folders, with those of other devices 4, and this run allows 3 from devices"
    )
    third = stage.fake("c", silent, classes=("1", "2"))
    stage.drive(lambda: bool(third.tasks()))
    assert stage.store.runs.read("r").classes == CLASSES


def test_classes_of_the_operator_are_the_runs_whichever_device_comes_first(stage: Stage, first: Tensors) -> None:
    """A first device with others is refused, and the bound on what devices bring does not hold for the list."""
    odd = stage.fake("odd", classes=("x", "y"))
    stage.start(classes=CLASSES, max_classes=2)
    stage.drive(lambda: bool(odd.got(Refused)))
    assert odd.got(Refused)[0].reason == "its class folders 'x', 'y' are not among this run's 3 classes: 0, 1, 2"
    stage.fake("a")
    assert stage.finish() == "finished"
    assert stage.store.runs.read("r").classes == CLASSES
    assert not [line for line in stage.lines if line.startswith("the run has")], "nobody else decided anything"
    assert_moved_by(stage, first, 1.0)


def test_coordinator_resumes_finished_run_with_more_rounds(stage: Stage) -> None:
    device = stage.fake("a")
    stage.start(rounds=1)
    assert stage.finish() == "finished"
    stage.start(rounds=3, resume=True)
    assert stage.finish() == "finished"
    assert stage.store.rounds.list_closed("r") == [1, 2, 3]
    assert device.tasks() == [1, 2, 3]
    assert device.tasks("evaluate") == [1, 2, 3]


def test_time_of_a_resumed_round_is_that_of_its_coordinators(stage: Stage) -> None:
    """The round was opened 5000 s ago; the first coordinator waited for devices in 500 s of them."""
    device = stage.fake("a", silent)
    stage.start()
    stage.drive(lambda: device.tasks() == [1])
    stage.stop()
    opened_at = (datetime.now(UTC) - timedelta(seconds=5000)).isoformat(timespec="milliseconds")
    with sqlite3.connect(stage.out / "fedvit.db") as database:
        database.execute("UPDATE rounds SET opened_at = ?, seal = NULL", (opened_at,))
    database.close()
    status = read_status(stage.out / "r")
    assert (status.round, status.devices_s > 0) == (1, True)
    written = msgspec.json.encode(msgspec.structs.replace(status, devices_s=500.0))
    (stage.out / "r" / "status.json").write_bytes(written)
    device.on_task = honest
    stage.start(resume=True)
    assert stage.finish() == "finished"
    record = stage.store.rounds.read("r", 1)
    assert record is not None
    assert 500 <= record.figures["devices_s"] < 5000
    assert record.figures["server_s"] < 500


def test_the_bar_of_a_device_that_is_done_is_full(stage: Stage) -> None:
    stage.fake("a")
    stage.fake("b", silent)
    stage.start(devices=2)

    def lines() -> dict[str, DeviceLine]:
        return {line.name: line for line in view(stage.coordinator.state).devices} if stage.coordinator else {}

    stage.drive(lambda: "a" in lines() and lines()["a"].state == "done")
    assert lines()["a"].done == lines()["a"].total == 1
    assert lines()["b"].done == 0


def test_coordinator_that_is_cancelled_ends_its_run_for_good(stage: Stage) -> None:
    """Its devices are told, and drop what they do."""
    device = stage.fake("a", lambda device, task: None)
    stage.start(rounds=3)
    stage.drive(lambda: device.tasks() == [1])
    assert stage.coordinator
    stage.coordinator.cancel("cancelled by the operator")
    assert isinstance(stage.finish(), Cancelled)
    stage.drive(lambda: device.got(RunEnded) == [RunEnded("r", "cancelled")])
    record = stage.store.runs.read("r")
    assert (record.status, record.reason) == ("cancelled", "cancelled by the operator")
    assert stage.store.runs.has_ended("r")


def test_run_that_ends_during_an_upload_closes_its_file(stage: Stage) -> None:
    """A service goes on, and would hold the files of all runs that were cancelled."""
    device = stage.fake("a")
    device.serves = False
    stage.start()
    stage.drive(lambda: bool(device.got(BlobNack)))
    blobs = str(stage.out / "r" / "blobs")
    assert [file for file in psutil.Process().open_files() if file.path.startswith(blobs)]
    assert stage.coordinator
    stage.coordinator.cancel("cancelled by the operator")
    assert isinstance(stage.finish(), Cancelled)
    assert not [file for file in psutil.Process().open_files() if file.path.startswith(blobs)]


def test_membership_asks_devices_with_the_runs_labels_alone(stage: Stage) -> None:
    """The others are welcome, are told why they are not asked, and are not of the run."""
    inside = stage.fake("a", labels={"site": "berlin", "board": "rpi5"})
    outside = stage.fake("b", labels={"site": "munich"})
    stage.start(devices_where="site=berlin", devices=1)
    assert stage.finish() == "finished"
    assert inside.tasks() == [1]
    assert outside.got(Task) == []
    assert {welcome.waiting_for for welcome in outside.got(Welcome)} == {
        "run r: it is for devices with site=berlin, and this one has site=munich"
    }
    assert [result.device for result in stage.store.tasks.read_used_in("r", 1)] == ["a"]


def test_a_hello_that_cannot_be_read_is_answered(stage: Stage) -> None:
    """Names of classes are at most 255 letters long; the device is told, and does not wait for a welcome in vain."""
    device = stage.fake("a")
    device.hello = msgspec.structs.replace(device.hello, classes=("x" * 256, "y"))
    stage.start(classes=())
    stage.drive(lambda: bool(device.got(Refused)))
    refused = device.got(Refused)[0]
    assert (refused.instance, refused.final) == (device.instance, True)
    assert "length <= 255" in refused.reason
    assert stage.refusals("a")[0].startswith("message: a message of ")


def test_a_hello_with_a_long_wrong_value_ends_no_run(stage: Stage) -> None:
    """The reason quotes the value, each of whose letters is written as four: it would not fit into a message."""
    bad = stage.fake("bad")
    fields = msgspec.msgpack.decode(encode(bad.hello)[1:])
    product = ["\x01" * 60_000, 1, 1, 1, 1, 1.0]
    fields[3]["speed"] = {"threads": 1, "products": [product], "bytes_per_s": {"Add": 1.0}, "node_s": 0.0}
    stage.start(devices=3)
    stage.drive(lambda: bool(bad.got(Welcome)))  # the coordinator listens, and waits for others
    bad.transport.publish(bad.topics.from_device("bad"), encode(bad.hello)[:1] + msgspec.msgpack.encode(fields))
    stage.drive(lambda: bool(bad.got(Refused)) or stage.outcome is not None)
    for name in ("one", "two", "three"):
        stage.fake(name)
    assert stage.finish() == "finished"
    assert max(map(len, stage.refusals("bad"))) < 2000


def test_a_run_needs_two_classes(stage: Stage) -> None:
    device = stage.fake("a", classes=("0",))
    stage.start(classes=())
    ended = stage.finish()
    assert isinstance(ended, ConfigError)
    assert "at least two classes" in str(ended)
    record = stage.store.runs.read("r")
    assert (record.status, record.reason) == ("failed", str(ended))
    assert device.got(RunEnded)[0].status.startswith("failed: a run needs at least two classes")


# --- devices that misbehave ---------------------------------------------------------------------------


def spoiled(change: Callable[[Tensors], Any]) -> Answer:
    """Honest but for its tensors."""

    def answer(device: Fake, task: Task) -> None:
        tensors = device.upload(task)
        change(tensors)
        device.bring(device.answer(task, tensors))

    return answer


def claimed(**changed: Any) -> Answer:
    """Honest but for its message."""

    def answer(device: Fake, task: Task) -> None:
        device.bring(msgspec.structs.replace(device.answer(task), **changed))

    return answer


def put(name: str, value: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.__setitem__(name, value)


def garbage(device: Fake, task: Task) -> None:
    manifest = device.blobs.put(b"these are no tensors")
    device.bring(msgspec.structs.replace(device.answer(task), upload=manifest))


def other_content(device: Fake, task: Task) -> None:
    """Announce one digest, serve other bytes under it."""
    result = device.answer(task)
    assert result.upload is not None
    path = device.blobs.path(result.upload.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    device.bring(result)


def then_give_up(answer: Answer) -> Answer:
    """Say something that closes nothing, then that it cannot."""

    def both(device: Fake, task: Task) -> None:
        answer(device, task)
        device.fail(task, "gives up")

    return both


def raw(*messages: bytes) -> Answer:
    def answer(device: Fake, task: Task) -> None:
        for message in messages:
            device.say_raw(message)
        device.fail(task, "gives up")

    return answer


def other_direction(device: Fake, task: Task) -> None:
    device.say_raw(encode(task))


FAR = 2**63
"""More than a database's integers hold."""

MISBEHAVIOUR: dict[str, tuple[Answer, str]] = {
    "nan": (spoiled(put("head.bias", np.full(3, np.nan, np.float32))), "'head.bias' holds 3 values that are NaN"),
    "infinite": (spoiled(put("head.bias", np.full(3, np.inf, np.float32))), "'head.bias' holds 3 values"),
    "shape": (spoiled(put("head.bias", np.zeros((1, 3), np.float32))), "'head.bias' has shape (1, 3), expected (3)"),
    "dtype": (spoiled(put("head.bias", np.zeros(3))), "'head.bias' has dtype float64, expected float32"),
    "missing": (spoiled(lambda tensors: tensors.pop("head.bias")), "1 tensors are missing, the first is 'head.bias'"),
    "extra": (spoiled(put("more", np.zeros(3, np.float32))), "1 tensors were not asked for, the first is 'more'"),
    "garbage": (garbage, "20 bytes are not safetensors"),
    "digest": (other_content, "has digest blake3:"),
    "name": (claimed(upload=Manifest("nonsense", 100, 1024)), "'nonsense' is not a blake3 digest"),
    "path": (claimed(upload=Manifest("blake3:../../x", 100, 1024)), "is not a blake3 digest"),
    "huge": (claimed(upload=Manifest(digest_of(b"x"), 10**11, 126_976)), "an upload of 100000000000 bytes"),
    "bare": (claimed(upload=None), "the upload is missing"),
    "many": (claimed(samples=11), "it reports 11 samples, the device announced 10"),
    "metric": (claimed(metrics={"loss": float("nan")}), "metric 'loss' is nan"),
    "round": (then_give_up(claimed(round=7)), "round 7"),
    "zero": (then_give_up(claimed(round=0)), "round 0"),
    "far": (then_give_up(claimed(round=FAR)), "cannot be read"),
    "early": (then_give_up(claimed(kind="evaluate", upload=None, metrics={"correct": 1.0}, samples=5)), "gives up"),
    "fails": (lambda device, task: device.fail(task, "no memory left"), "no memory left"),
    "astray": (then_give_up(lambda device, task: device.say(Failed("r", 99, "train", "lost"))), "lost"),
    "farther": (then_give_up(lambda device, task: device.say(Failed("r", FAR, "train", "lost"))), "cannot be read"),
    "noise": (raw(b"", b"\x01", b"\x01\xff\xff", b"\x01" + b"\x91" * 5000), "cannot be read"),
    "wordy": (raw(b"\x01" + bytes(70_000)), "exceeds the limit of 65536 bytes"),
    "backwards": (then_give_up(other_direction), "a Task is not for the coordinator"),
    "curious": (
        then_give_up(lambda device, task: device.say(BlobNack(digest_of(b"?"), ((0, 1),)))),
        "it was not offered",
    ),
    "greedy": (
        then_give_up(lambda device, task: device.say(BlobNack(task.program, ((5, 10**9),)))),
        "wants chunks 5 to",
    ),
    "newer": (then_give_up(lambda device, task: device.say_raw(b"\x09" + bytes(10))), "wire version 9"),
}
"""By name of the device: what it does when it is asked to train, and what the record says of it."""


@pytest.fixture(scope="module")
def misbehaved(tmp_path_factory: pytest.TempPathFactory, configure: Configure, graph_cache: Path) -> Iterator[Stage]:
    """One round with one honest device and every other kind."""
    patch = pytest.MonkeyPatch()
    patch.setattr(blob_receiver, "STALL_S", 0.05)  # content that is wrong is fetched again three times
    patch.setattr(chunk_sender, "FRESH_S", 0.01)
    stage = Stage(tmp_path_factory.mktemp("misbehaved"), configure, graph_cache)
    stage.fake("honest")
    for name, (answer, _) in MISBEHAVIOUR.items():
        stage.fake(name, answer, value=1000.0)
    stage.start(devices=len(stage.fakes))
    stage.finish()
    yield stage
    stage.stop()
    patch.undo()


def test_the_round_closes_with_the_honest_device_alone(misbehaved: Stage, first: Tensors) -> None:
    assert misbehaved.outcome == "finished"
    assert misbehaved.accepted(1) == ["honest"]
    assert_moved_by(misbehaved, first, 1.0)
    [entry] = misbehaved.store.rounds.read_all("r")
    assert entry.figures["cohort"] == 1 + len(MISBEHAVIOUR)
    assert entry.figures["accepted"] == 1


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_is_recorded_and_the_device_stays_in_the_run(misbehaved: Stage, name: str) -> None:
    [device] = [fake for fake in misbehaved.fakes if fake.name == name]
    recorded = misbehaved.refusals(name)
    reason = MISBEHAVIOUR[name][1]
    assert any(reason in said for said in recorded), recorded
    assert len(recorded) <= 5
    if name in ("nan", "shape", "garbage", "digest", "name", "huge", "bare", "many", "metric", "round"):
        assert any(reason in said for said in device.reasons()), "the device is told why"
    assert device.tasks() == [1]
    assert device.answers("evaluate")[-1] == (1, True)
    assert name in misbehaved.accepted(1, "evaluate")


@pytest.mark.parametrize(
    ("announced", "named"),
    [
        ({"samples": 0}, "it has no training images"),
        ({"classes": ("0", "wasp")}, "its class folder 'wasp' is not among this run's 3 classes"),
    ],
)
def test_device_that_cannot_take_part_is_refused(stage: Stage, announced: dict[str, Any], named: str) -> None:
    """While the run waits for its first device; no program is made for this."""
    device = stage.fake("a", **announced)
    stage.start()
    stage.drive(lambda: bool(device.got(Refused)))
    refused = device.got(Refused)[0]  # a device may greet twice: when it connects, and when it hears of a coordinator
    assert refused.final
    assert refused.instance == device.instance
    assert named in refused.reason
    assert set(stage.refusals("a")) == {f"hello: {refused.reason}"}
    assert device.got(Welcome) == []


def test_a_device_of_another_version_is_answered_in_the_version_byte(stage: Stage) -> None:
    """It cannot read more; the answer's first byte is our version, and the text is for a person."""
    device = stage.fake("a")
    device.hello = msgspec.structs.replace(device.hello, train_samples=0)  # stays out of the run
    stage.start()
    stage.drive(lambda: bool(device.got(Refused)))  # the coordinator is listening; each hello is refused

    def texts() -> list[str]:
        return [refused.reason for refused in device.got(Refused) if "version" in refused.reason]

    device.say_raw(bytes([2]) + encode(device.hello)[1:])
    stage.drive(lambda: bool(texts()))
    assert texts() == [
        "the other side speaks wire version 2, this side speaks version 1; install the same version on both sides"
    ]
    assert all(refused.final for refused in device.got(Refused))


def test_request_for_coordinator_state_is_answered_without_joining(stage: Stage) -> None:
    """As `edge-client doctor` asks it."""
    asks = stage.fake("asks", silent)
    asks.hello = msgspec.structs.replace(asks.hello, train_samples=0)  # refused, whenever it is said
    stage.start()
    stage.drive(lambda: bool(asks.got(Refused)))
    before = len(asks.got(CoordinatorState))
    asks.transport.publish(asks.topics.device_state("asks"), encode(DeviceState("other", online=True)))
    stage.drive(lambda: len(asks.got(CoordinatorState)) > before)
    answer = asks.got(CoordinatorState)[-1]
    assert (answer.run, answer.alive) == ("r", True)
    assert asks.got(Welcome) == []


def test_two_devices_with_one_name(stage: Stage, first: Tensors) -> None:
    """The one that is here stays; the other is told where it is, and comes in when that one leaves."""
    one = stage.fake("pi", silent, host="kitchen")
    stage.start()
    stage.drive(lambda: one.tasks() == [1])
    other = stage.fake("pi", host="cellar")
    stage.drive(lambda: bool(other.got(Refused)))
    refused = next(refused for refused in other.got(Refused) if refused.instance == other.instance)
    assert not refused.final
    assert "'pi' is online already (on kitchen)" in refused.reason
    assert "--id" in refused.reason
    assert stage.refusals("pi") == [f"hello: {refused.reason}"]
    assert other.got(Welcome) == []
    other.say(DeviceState(other.instance, online=False))  # the rival's farewell takes nobody away
    stage.fakes.remove(one)
    one.transport.vanish()
    stage.drive(lambda: bool(other.step() or other.say(other.hello) or other.got(Welcome)))
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)


# --- how a round closes -------------------------------------------------------------------------------


def test_duplicates_count_once(stage: Stage, first: Tensors) -> None:
    """Said three times, and three times more, with other content, after it was accepted: 1 and 3 make 2."""

    def thrice(device: Fake, task: Task) -> None:
        result = device.answer(task)
        for _ in range(3):
            device.bring(result)

    a, b = stage.fake("a", thrice, value=1.0), stage.fake("b", silent, value=3.0)
    stage.start(devices=2)
    stage.drive(lambda: (1, True) in a.answers() and bool(b.tasks()))
    [task] = a.got(Task)
    different = a.answer(task, {name: value * 50 for name, value in a.upload(task).items()})
    before = len(a.answers())
    for _ in range(3):
        a.bring(different)
    stage.drive(lambda: len(a.answers()) == before + 3)
    b.bring(b.answer(b.got(Task)[0]))
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 2.0)
    assert all(accepted for _, accepted in a.answers())
    assert stage.accepted(1) == ["a", "b"]
    assert stage.store.devices.read_refusals("r") == []


def test_a_quorum_closes_the_round_and_what_comes_later_is_refused(stage: Stage, first: Tensors) -> None:
    """Half of three devices is 1.5, so two answers close it: (1 + 3) / 2 = 2. The third comes in round 2."""
    late = stage.fake("late", silent, value=1000.0)
    stage.fake("a", value=1.0)
    stage.fake("b", value=3.0)
    stage.start(devices=3, rounds=2, quorum=0.5, evaluate_every=9)
    stage.drive(lambda: late.tasks() == [1, 2])
    late.bring(late.answer(late.got(Task)[0]))
    stage.drive(lambda: (1, False) in late.answers())
    assert "late" in late.reasons()[0]
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 4.0)
    assert stage.accepted(1) == stage.accepted(2) == ["a", "b"]
    assert [said.startswith("train: late: round 1") for said in stage.refusals("late")] == [True]


def test_uploads_that_wait_for_their_turn_when_the_round_closes_are_late(
    stage: Stage, first: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven results, one is enough, four are fetched at a time: six are late, and count in no round but theirs.

    The model moves by the update of the one that was fetched, and by the mean of those of round 2.
    """
    monkeypatch.setattr("coordinator.rounds.uploads.CHUNKS_AT_ONCE", 4)  # each upload is one
    fakes = [stage.fake(f"d{number}", value=float(number)) for number in range(7)]
    for device in fakes:
        device.serves = False
    stage.start(devices=7, rounds=2, quorum=0.1, evaluate_every=9)
    stage.drive(lambda: sum(bool(device.got(BlobNack)) for device in fakes) == 4)
    served = next(device for device in fakes if device.got(BlobNack))
    served.serves = True
    served.exchange.on_nack("coordinator", served.got(BlobNack)[-1])
    stage.drive(lambda: all(device.tasks() == [1, 2] for device in fakes))
    for device in fakes:
        device.serves = True
        if device is not served and device.got(BlobNack):
            device.exchange.on_nack("coordinator", device.got(BlobNack)[-1])
    assert stage.finish() == "finished"
    assert stage.accepted(1) == [served.name]
    second = [device.value for device in fakes if device.name in stage.accepted(2)]
    assert_moved_by(stage, first, served.value + sum(second) / len(second))
    for device in fakes:
        if device is not served:
            assert (1, True) not in device.answers()


def test_a_deadline_closes_the_round(stage: Stage, first: Tensors) -> None:
    stage.fake("a")
    slow = stage.fake("slow", silent, value=1000.0)
    stage.start(devices=2, deadline_s=0.4)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)
    assert stage.refusals("slow") == ["train: no result: deadline"]
    assert 0 < slow.got(Task)[0].deadline_s <= 1.0


def test_a_device_that_left_is_waited_for_no_longer_than_the_grace(stage: Stage, first: Tensors) -> None:
    """Its deadline is ten minutes away."""

    def leave(device: Fake, task: Task) -> None:
        device.transport.vanish()

    stage.fake("a")
    stage.fake("gone", leave)
    stage.start(devices=2, rejoin_grace_s=0.2)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)
    assert stage.refusals("gone") == ["train: no result: offline"]
    assert stage.accepted(1, "evaluate") == ["a"]


def test_a_device_that_comes_back_in_time_is_asked_again(stage: Stage, first: Tensors) -> None:
    """The same name, another process: the task is for the new one. (1 + 5) / 2 = 3."""
    stage.fake("a", value=1.0)
    gone = stage.fake("b", silent)
    stage.start(devices=2)
    stage.drive(lambda: gone.tasks() == [1] and stage.accepted(1) == ["a"])
    stage.fakes.remove(gone)
    gone.transport.vanish()
    back = stage.fake("b", value=5.0)
    assert stage.finish() == "finished"
    assert back.tasks() == [1]
    assert back.got(Task)[0].instance == back.instance
    assert_moved_by(stage, first, 3.0)


def test_device_that_leaves_during_its_upload_sends_it_again(stage: Stage, first: Tensors) -> None:
    """It finds the result in its vault; here: it is handed over."""
    gone = stage.fake("b")
    gone.serves = False
    stage.start()
    stage.drive(lambda: bool(gone.got(BlobNack)))
    stage.fakes.remove(gone)
    gone.transport.vanish()
    back = stage.fake("b")
    back.pending = gone.pending
    for result in gone.pending.values():
        assert result.upload is not None
        back.blobs.put(gone.blobs.get(result.upload.digest))
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)
    assert stage.store.devices.read_refusals("r") == []


def test_round_continues_after_the_link_broke(stage: Stage, first: Tensors) -> None:
    """A new epoch makes all devices say hello; who had not answered is asked again, who had is not."""
    done, late = stage.fake("done"), stage.fake("late", silent)
    stage.start(devices=2)
    stage.drive(lambda: stage.accepted(1) == ["done"] and late.tasks() == [1])
    epochs = {state.epoch for state in late.got(CoordinatorState)}
    stage.broker.stop()
    stage.broker.start()
    stage.drive(lambda: late.got(Task)[-1].epoch != late.got(Task)[0].epoch)
    assert {state.epoch for state in late.got(CoordinatorState) if state.alive} > {epoch for epoch in epochs if epoch}
    late.on_task = honest
    late.bring(late.answer(late.got(Task)[-1]))
    assert stage.finish() == "finished"
    assert done.tasks() == [1]
    assert_moved_by(stage, first, 1.0)


def test_device_that_left_during_a_broken_link_is_not_awaited(stage: Stage, first: Tensors) -> None:
    """The broker dies and takes the last will with it: after the link is back, only who says hello is here."""
    stage.fake("a")
    gone = stage.fake("gone", silent)
    stage.start(devices=2, rejoin_grace_s=0.2)
    stage.drive(lambda: stage.accepted(1) == ["a"] and gone.tasks() == [1])
    stage.broker.stop()
    stage.fakes.remove(gone)
    gone.transport.close()
    stage.broker.start()
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)
    assert stage.refusals("gone") == ["train: no result: offline"]


def test_progress_is_shown_and_changes_nothing(stage: Stage, first: Tensors) -> None:
    def chatty(device: Fake, task: Task) -> None:
        for done in (1, 2, 2**31 - 1):
            device.say(Progress(task.run, task.round, task.kind, done, 2, float("nan")))
        honest(device, task)

    stage.fake("a", chatty)
    stage.start()
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 1.0)


# --- what devices may have ----------------------------------------------------------------------------


def test_a_device_cannot_have_what_another_uploaded(stage: Stage) -> None:
    """While the round is open the upload lies in the coordinator's store; the program may be had."""
    a, b = stage.fake("a"), stage.fake("b", silent)
    stage.start(devices=2)
    stage.drive(lambda: (1, True) in a.answers() and b.tasks() == [1])
    [upload] = [result.upload for result in stage.store.tasks.read_results("r", 1, "train")]
    assert upload is not None
    assert BlobStore(stage.out / "r" / "blobs").has(upload)
    [task] = b.got(Task)
    heard: SimpleQueue[object] = SimpleQueue()
    listener = MemoryTransport(heard, stage.broker, "listener")
    listener.subscribe("fl1/home/all/b/+", 0)
    listener.open()
    b.say(BlobNack(upload, ((0, 1),)))
    b.say(BlobNack(task.program, ((0, 1),)))
    stage.drive(lambda: listener.received_bytes > 0)
    stage.drive(lambda: bool(stage.refusals("b")))
    assert stage.refusals("b") == [f"blob: b asks for blob {upload}, which it was not offered"]
    topics = set()
    while not heard.empty():
        event = heard.get()
        if isinstance(event, Received):
            topics.add(event.topic)
    assert topics == {Topics("home").broadcast(task.program)}


# --- what the server makes for each device ------------------------------------------------------------


def first_z(device: str) -> np.ndarray:
    """A device's embedding before its first round, in a run of seed 0."""
    return torch.randn(len(CLASSES), generator=drawing(0, "device", device)).numpy()


def test_each_device_gets_what_was_made_for_it(stage: Stage) -> None:
    """Two devices of 1 and 3 images send deltas of 1 and 4. The bias is phi z with phi = 2; at a rate of 0.5 the mean's
    gradient makes of phi: 2 + 0.5 * (1/4 * sum(1 * z_a) + 3/4 * sum(4 * z_b)), and of each embedding: z + 0.5 * share *
    delta * 2. The rest of the model moves by the mean, 13/4."""
    a, b = stage.fake("a", silent, samples=1, value=1.0), stage.fake("b", silent, samples=3, value=4.0)
    stage.start(method="generated", devices=2)
    stage.drive(lambda: a.tasks() == b.tasks() == [1])
    for device in (a, b):
        [task] = [task for task in device.got(Task) if task.kind == "train"]
        assert set(task.groups) == {"bias", "model"}
        np.testing.assert_allclose(stage.sent(task.groups["bias"])["head.bias"], 2 * first_z(device.name), rtol=1e-6)
        assert {manifest.digest for manifest in task.blobs} >= set(task.groups.values())
    first = stage.sent(b.got(Task)[0].groups["model"])
    assert "head.bias" not in first
    assert a.got(Task)[0].groups["model"] == b.got(Task)[0].groups["model"]
    assert a.got(Task)[0].groups["bias"] != b.got(Task)[0].groups["bias"]
    assert stage.coordinator is not None
    asked = [stage.coordinator.state.tasks.count_receivers(b.got(Task)[0].groups[group]) for group in ("model", "bias")]
    assert asked == [2, 1], "nobody is waited for who will not ask for it"
    for device in (a, b):
        honest(device, device.got(Task)[0])
    assert stage.finish() == "finished"
    za, zb = first_z("a"), first_z("b")
    phi = 2 + 0.5 * (za.sum() / 4 + 3 * zb.sum())
    for name, z in (("a", za + 0.5 * 2 * 1 / 4), ("b", zb + 0.5 * 2 * 3)):
        made = unpack((stage.out / "r" / "generated" / f"{name}.safetensors").read_bytes())
        np.testing.assert_allclose(made["head.bias"], phi * z, rtol=1e-5, atol=1e-5)
    assert stage.model().keys() == first.keys()
    for name, value in first.items():
        np.testing.assert_allclose(stage.model()[name], value + 13 / 4, atol=1e-5, err_msg=name)


def test_evaluation_uses_newest_generated_tensors(stage: Stage) -> None:
    """That of the next round: what training made of the generator is tested."""
    device = stage.fake("a")
    stage.start(method="generated", rounds=2)
    assert stage.finish() == "finished"
    groups = {(task.kind, task.round): task.groups["bias"] for task in device.got(Task)}
    assert groups["evaluate", 1] == groups["train", 2]
    assert len(set(groups.values())) == 3


def test_a_device_cannot_have_what_was_made_for_another(stage: Stage) -> None:
    """Nor what was made for itself in an earlier round."""
    a, b = stage.fake("a"), stage.fake("b", silent)
    stage.start(method="generated", devices=2, rounds=2, evaluate_every=2)
    stage.drive(lambda: (1, True) in a.answers() and b.tasks() == [1])
    mine, others = b.got(Task)[0].groups["bias"], a.got(Task)[0].groups["bias"]
    b.say(BlobNack(mine, ((0, 1),)))
    b.say(BlobNack(others, ((0, 1),)))
    stage.drive(lambda: bool(stage.refusals("b")))
    assert stage.refusals("b") == [f"blob: b asks for blob {others}, which it was not offered"]
    assert stage.coordinator is not None
    assert [stage.coordinator.state.tasks.may_read(name, mine) for name in ("a", "b", "c")] == [False, True, False]
    honest(b, b.got(Task)[0])
    stage.drive(lambda: b.tasks() == [1, 2])
    assert not stage.coordinator.state.tasks.may_read("b", mine)
    honest(b, b.got(Task)[-1])
    assert stage.finish() == "finished"


def test_a_device_that_trained_in_no_round_gets_its_own_too(stage: Stage) -> None:
    """It joins when all rounds but the evaluation are under way: made of the newest generator and of an embedding that
    follows from its name."""
    a = stage.fake("a", silent)
    stage.start(method="generated")
    stage.drive(lambda: a.tasks() == [1])
    novel = stage.fake("novel")
    stage.drive(lambda: bool(novel.got(Welcome)))
    honest(a, a.got(Task)[0])
    stage.drive(lambda: bool(novel.tasks("evaluate")))
    assert stage.finish() == "finished"
    assert novel.tasks() == []
    phi = 2 + 0.5 * first_z("a").sum()
    made = unpack((stage.out / "r" / "generated" / "novel.safetensors").read_bytes())
    np.testing.assert_allclose(made["head.bias"], phi * first_z("novel"), rtol=1e-5)
    [task] = novel.got(Task)
    assert task.groups["bias"] == digest_of(pack(made))
    assert task.groups["model"] == a.got(Task)[-1].groups["model"]


def test_what_was_made_for_one_round_is_deleted_after_it(stage: Stage) -> None:
    """Left are the program, three graphs, the model, the generator, and what was made for the last evaluation."""
    device = stage.fake("a")
    stage.start(method="generated", rounds=3, backup_every=0)
    assert stage.finish() == "finished"
    last = device.got(Task)[-1]
    kept = {path.name for path in (stage.out / "r" / "blobs").glob("*/*")}
    assert {digest.partition(":")[2] for digest in (last.program, *last.groups.values())} <= kept
    assert len(kept) == 1 + 3 + 1 + 1 + 1


# --- devices with programs of their own ---------------------------------------------------------------


def test_devices_of_two_splits_train_one_model(stage: Stage) -> None:
    """One has one block of three, the other two: each is asked for its features, told by the block that they enter, and
    what both get from the server is the same."""
    pi, jetson = stage.fake("pi"), stage.fake("jetson-1")
    stage.start(method="eftvit", devices=2, variants={"jetson-*": {"local_blocks": 2}})
    assert stage.finish() == "finished"
    small, large = pi.got(Task)[0], jetson.got(Task)[0]
    assert small.program != large.program
    assert set(small.groups) == {"head", "norm", "block.1", "block.2"}
    assert large.groups == {group: small.groups[group] for group in ("head", "norm", "block.2")}
    assert stage.accepted(1) == ["jetson-1", "pi"]
    assert stage.store.devices.read_refusals("r") == []
    [record] = stage.store.rounds.read_all("r")
    assert (record.figures["server_features"], record.figures["stored_devices"]) == (12, 2)
    assert {name.split(".")[1] for name in stage.model() if name.startswith("blocks.")} == {"1", "2"}


def test_a_result_is_held_against_the_program_of_its_device(stage: Stage) -> None:
    """Features of the other split are not what this device was asked for."""

    def of_the_other(device: Fake, task: Task) -> None:
        upload = device.upload(task)
        upload["features.1"] = upload.pop("features.2")
        device.bring(device.answer(task, upload))

    stage.fake("pi")
    stage.fake("jetson-1", of_the_other)
    stage.start(method="eftvit", devices=2, variants={"jetson-*": {"local_blocks": 2}})
    assert stage.finish() == "finished"
    assert stage.accepted(1) == ["pi"]
    assert "features.2" in stage.refusals("jetson-1")[0]


def test_the_store_of_features_drops_the_oldest_round_and_its_file(stage: Stage) -> None:
    """Four devices in turn, one a round, and room for the uploads of two: the run is stopped behind the third round,
    and a second process still knows which is the oldest. Files of what was dropped are deleted."""

    def leave(device: Fake, task: Task) -> None:
        if task.round < 4:
            honest(device, task)

    run: dict[str, Any] = {
        "method": "eftvit", "devices": 4, "cohort": 1, "selection": "fair", "rounds": 4, "seed": 3,
        "options": {"feature_store_bytes": 20_000}, "backup_every": 0,  # copies of the record need older uploads
    }  # fmt: skip
    for name in "abcd":
        stage.fake(name, leave)
    stage.start(**run)
    stage.drive(lambda: any(4 in device.tasks() for device in stage.fakes))
    stage.stop()
    for device in stage.fakes:
        device.on_task = honest
    stage.start(resume=True, **run)
    assert stage.finish() == "finished"
    came = [stage.accepted(number)[0] for number in (1, 2, 3, 4)]
    assert sorted(came) == ["a", "b", "c", "d"]
    assert came != sorted(came), "devices' names say nothing of their age"
    records = stage.store.rounds.read_all("r")
    kept = [list(record.state.uploads) for record in records if record.state]
    assert kept == [came[:1], came[:2], came[1:3], came[2:4]]
    assert [record.figures["dropped_devices"] for record in records] == [0, 0, 1, 1]
    uploads = {result.device: result.upload for result in stage.store.tasks.read_results("r") if result.kind == "train"}
    blobs = BlobStore(stage.out / "r" / "blobs")
    assert [blobs.has(uploads[name] or "") for name in came] == [False, False, True, True]
    assert records[-1].figures["stored_bytes"] == sum(blobs.manifest(uploads[name] or "").size for name in came[2:])


def test_devices_with_high_losses_are_asked_also_by_a_second_process(stage: Stage) -> None:
    """The candidate with the higher last loss trains; a device that never answered comes first."""
    losses = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}

    def tell_loss(device: Fake, task: Task) -> None:
        answer = device.answer(task)
        metrics = {"loss": losses[device.name]} if task.kind == "train" else answer.metrics
        device.bring(msgspec.structs.replace(answer, metrics=metrics))

    def leave(device: Fake, task: Task) -> None:
        if task.round < 7:
            tell_loss(device, task)

    run: dict[str, Any] = {
        "method": "fedavg", "devices": 4, "cohort": 1, "selection": "power_of_choice", "rounds": 12, "seed": 3,
        "evaluate_every": 20,
    }  # fmt: skip
    for name in losses:
        stage.fake(name, leave)
    stage.start(**run)
    stage.drive(lambda: any(7 in device.tasks() for device in stage.fakes))
    stage.stop()
    for device in stage.fakes:
        device.on_task = tell_loss
    stage.start(resume=True, **run)
    assert stage.finish() == "finished"
    known: set[str] = set()
    for number in range(1, 13):
        [asked] = stage.accepted(number)
        candidates = select_uniform(losses, 2, 3, number)
        assert asked in candidates
        new = [name for name in candidates if name not in known]
        assert asked in (new or [max(candidates, key=lambda name: losses[name])])
        known.add(asked)


# --- beginning where another run ended ----------------------------------------------------------------


def test_a_run_can_begin_where_another_ended(stage: Stage, first: Tensors) -> None:
    """Two rounds of 1 each in one run, a third in the next: 3 in all."""
    stage.fake("a")
    stage.start(rounds=2)
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 2.0)
    stage.stop()
    (stage.out / "r").rename(stage.out / "monday")
    shutil.rmtree(stage.out / COPIES)  # they know a run "r"
    with sqlite3.connect(stage.out / "fedvit.db") as database:
        for table, column in (("runs", "id"), ("rounds", "run"), ("results", "run")):
            database.execute(f"UPDATE {table} SET {column} = 'monday', seal = NULL")
    database.close()
    stage.start(start_from="monday")
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 3.0)


def test_a_run_that_tests_another_and_is_paused_tests_that_one(
    stage: Stage, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when it opens its test, so that it makes the Program again."""
    device = stage.fake("a")
    stage.start(rounds=1)
    assert stage.finish() == "finished"
    trained = stage.store.rounds.read_newest_closed("r")
    test = {"rounds": 0, "start_from": "r"}
    stage.store.runs.create("t", msgspec.to_builtins(configure(**test, classes=CLASSES)))
    stage.stop()
    open_test, full = RecordJournal.open_test, [True]

    def run_out(journal: RecordJournal) -> RoundRecord:
        if full:
            full.clear()
            raise NoRoom("FV0011", "the disk is full")
        return open_test(journal)

    monkeypatch.setattr(RecordJournal, "open_test", run_out)
    monkeypatch.setattr(pausing, "FREE_SPACE_CHECK_S", 0.01)
    stage.start(run="t", **test)
    assert stage.finish() == "finished"
    [tested] = [task for task in device.got(Task) if task.run == "t"]
    assert trained is not None
    assert trained.state is not None
    assert tested.groups == trained.state.groups


def test_a_run_leaves_its_configuration_as_a_file_that_start_takes(stage: Stage) -> None:
    """All of it, also what was not said; what has no value is left out."""
    stage.fake("a")
    stage.start(rounds=1, options={"lr": 0.5, "clip_norm": None}, budget={"memory_budget": "2GB"})
    assert stage.finish() == "finished"
    file = stage.out / "r" / "run.toml"
    began = stage.coordinator.state.config
    again = make_config(read_toml(file), str(file)).run
    set_options = {name: value for name, value in began.options.items() if value is not None}
    assert again == msgspec.structs.replace(began, options=set_options)
    assert "rejoin_grace_s = 600.0" in file.read_text()


def test_a_run_to_begin_from_must_be_there_and_have_got_somewhere(stage: Stage) -> None:
    stage.fake("a")
    stage.start(start_from="monday")
    ended = stage.finish()
    assert isinstance(ended, ConfigError)
    assert "no run 'monday'" in str(ended)
    assert stage.store.runs.read("r").reason == str(ended)
    stage.store.runs.create("monday", {})
    stage.stop()
    stage.start(start_from="monday", resume=True)
    assert str(stage.finish()) == "start_from = 'monday': that run closed no round"


def test_how_accuracy_is_measured_is_in_the_record(stage: Stage) -> None:
    stage.fake("a")
    stage.start(evaluation="pre_aggregation")
    assert stage.finish() == "finished"
    assert stage.store.runs.read("r").protocol == PROTOCOLS["pre_aggregation"]


# --- when it cannot go on -----------------------------------------------------------------------------


def test_round_without_results_is_repeated_and_then_the_run_fails(stage: Stage) -> None:
    devices = [stage.fake(name, lambda device, task: device.fail(task, "no memory left")) for name in ("a", "b")]
    stage.start(devices=2)
    ended = stage.finish()
    assert isinstance(ended, EmptyCohort)
    assert "round 1: no usable result in 3 attempts" in str(ended)
    assert ATTEMPTS == 3
    for device in devices:
        assert device.tasks() == [1, 1, 1]
        assert stage.refusals(device.name) == ["train: no memory left"] * 3
        assert device.got(RunEnded) == [RunEnded("r", f"failed: {ended}")]
    record = stage.store.runs.read("r")
    assert (record.status, record.reason) == ("failed", str(ended))
    assert [entry.closed_at for entry in stage.store.rounds.read_all("r")] == [None]


def test_a_record_that_cannot_be_written_ends_the_run(stage: Stage) -> None:
    """Not before: a device that was told that its result is safe must be able to rely on it."""
    device = stage.fake("a", silent)
    stage.start()
    stage.drive(lambda: device.tasks() == [1])
    with sqlite3.connect(stage.out / "fedvit.db") as database:
        database.execute("ALTER TABLE results RENAME COLUMN metrics TO gone")
    database.close()
    honest(device, device.got(Task)[0])
    ended = stage.finish()
    assert isinstance(ended, StorageFailed)
    assert "metrics" in str(ended)
    assert device.answers() == []
    assert stage.store.runs.read("r").status == "failed"


def test_round_with_results_in_its_second_attempt_counts(stage: Stage, first: Tensors) -> None:
    def once_more(device: Fake, task: Task) -> None:
        if len(device.tasks()) == 1:
            device.fail(task, "try me again")
        else:
            honest(device, task)

    device = stage.fake("a", once_more)
    stage.start(rounds=2)
    assert stage.finish() == "finished"
    assert device.tasks() == [1, 1, 2]
    assert_moved_by(stage, first, 2.0)


def test_a_failed_run_can_go_on_when_the_reason_is_gone(stage: Stage, first: Tensors) -> None:
    device = stage.fake("a", lambda device, task: device.fail(task, "no memory left"))
    stage.start()
    assert isinstance(stage.finish(), EmptyCohort)
    stage.stop()
    device.on_task = honest
    stage.start(resume=True)
    assert stage.finish() == "finished"
    assert stage.store.runs.read("r").status == "finished"
    assert_moved_by(stage, first, 1.0)


def test_a_run_does_not_go_on_with_another_program(stage: Stage) -> None:
    stage.fake("a", silent)
    stage.start()
    stage.drive(lambda: bool(stage.fakes[0].tasks()))
    stage.stop()
    assert stage.store.runs.read("r").status == "interrupted"
    stage.start(resume=True, options={"lr": 0.07})
    ended = stage.finish()
    assert isinstance(ended, ConfigError)
    assert "resume it with the versions it began with" in str(ended)


# --- going on after an end ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "eftvit", "generated"])
@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_restarted_coordinator_continues_where_it_was(
    tmp_path: Path, configure: Configure, graph_cache: Path, method: str, end: str
) -> None:
    """In round 2 of 3 one of two results is in when it ends; the final tensors are those of a run without an end.

    "killed" goes on with a copy of the folder that was made while the coordinator was running: what a
    kill -9 leaves. EFTViT's server has an optimizer and features to remember as well, another a generator: what it
    made for a device in round 2 it makes again, to the bit.
    """
    whole = Stage(tmp_path / "whole", configure, graph_cache)
    for name, samples in (("a", 30), ("b", 40)):
        whole.fake(name, by_round, samples=samples)
    whole.start(method=method, devices=2, rounds=3)
    assert whole.finish() == "finished"
    whole.stop()

    broken = Stage(tmp_path / "broken", configure, graph_cache)
    a = broken.fake("a", by_round, samples=30)
    b = broken.fake("b", by_round, samples=40)
    b.on_task = lambda device, task: by_round(device, task) if task.round == 1 else None
    broken.start(method=method, devices=2, rounds=3)
    broken.drive(lambda: b.tasks() == [1, 2] and broken.accepted(2) == ["a"])
    if end == "killed":
        shutil.copytree(broken.out, tmp_path / "left")
    broken.stop()
    if end == "killed":
        shutil.rmtree(broken.out)
        shutil.move(tmp_path / "left", broken.out)
    b.on_task = by_round
    if end == "stopped":
        by_round(b, b.got(Task)[-1])  # said to nobody; said again after the welcome
    broken.start(method=method, resume=True, devices=2, rounds=3)
    assert broken.finish() == "finished"
    assert a.tasks() == [1, 2, 3], "its result of round 2 was kept"
    assert b.tasks() == [1, 2, 2, 3]
    assert [entry.cohort for entry in broken.store.rounds.read_all("r")] == [["a", "b"]] * 3
    assert broken.accepted(2) == ["a", "b"]
    assert broken.store.devices.read_refusals("r") == []
    assert [task.groups for task in b.got(Task) if (task.round, task.kind) == (2, "train")] == [
        next(task.groups for task in whole.fakes[1].got(Task) if task.round == 2)
    ] * 2
    want, got = whole.model(), broken.model()
    for name in ("a", "b"):
        made = [stage.out / "r" / "generated" / f"{name}.safetensors" for stage in (whole, broken)]
        assert [file.exists() for file in made] == [method == "generated"] * 2
        assert method != "generated" or made[0].read_bytes() == made[1].read_bytes()
    broken.stop()
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert value.tobytes() == got[name].tobytes(), name


@pytest.mark.parametrize(
    ("status", "kept"), [("interrupted", True), ("failed", True), (None, True), ("finished", False)], ids=str
)
def test_a_result_of_another_run_is_kept_by_its_device_unless_that_run_has_ended(
    stage: Stage, status: str | None, *, kept: bool
) -> None:
    """Another run may be resumed, here or by another coordinator: its result is neither taken nor refused."""
    if status:
        with open_record(stage.out) as store:
            store.runs.create("yesterday", {})
            store.runs.update("yesterday", status=status)
    device = stage.fake("a", then_give_up(claimed(run="yesterday")))
    stage.fake("b")
    stage.start(devices=2)
    assert stage.finish() == "finished"
    [answer] = [ack for ack in device.got(ResultAck) if ack.run == "yesterday"]
    assert (answer.accepted, answer.keep) == (False, kept)
    assert ("train: run 'yesterday' has ended" in stage.refusals("a")) is not kept


# --- devices that lie ---------------------------------------------------------------------------------


def poisoned(device: Fake, task: Task) -> None:
    """What no honest device sends."""
    device.bring(device.answer(task, {name: value * np.nan for name, value in device.upload(task).items()}))


def test_the_run_s_aggregator_decides(stage: Stage, first: Tensors) -> None:
    """Updates 1, 2, 900: their median is 2."""
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 900.0)):
        stage.fake(name, value=value)
    stage.start(devices=3, robust={"aggregator": "median"})
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 2.0)


def test_what_is_out_of_scale_is_left_out_and_leads_to_quarantine(stage: Stage, first: Tensors) -> None:
    """Updates of 1 but for 900: in rounds 1 and 2 left out, then not asked any more; each round moves by 1."""
    fakes = [stage.fake(name) for name in ("a", "b", "c")]
    liar = stage.fake("d", value=900.0)
    stage.start(devices=4, rounds=4, robust={"reject_scale": 5.0, "strikes": 2})
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 4.0)
    assert liar.tasks() == [1, 2]
    [refused] = liar.got(Refused)
    assert refused.final
    assert "quarantine until it is released: 2 strikes, the last: its update has norm" in refused.reason
    assert "coordinator quarantine r --release d" in refused.reason
    assert all(reason.startswith("train: left out: its update has norm") for reason in stage.refusals("d"))
    assert len(stage.refusals("d")) == 2
    assert all(device.tasks() == [1, 2, 3, 4] for device in fakes)


def test_a_quarantine_of_some_rounds_is_waited_for(stage: Stage, first: Tensors) -> None:
    """Refused in round 1, kept out of round 2, asked again in round 3."""
    stage.fake("a")
    liar = stage.fake("b", poisoned)
    stage.start(devices=2, rounds=3, robust={"strikes": 1, "quarantine_rounds": 1})
    stage.drive(lambda: bool(liar.answers()))
    liar.on_task = honest
    assert stage.finish() == "finished"
    assert (liar.tasks(), liar.tasks("evaluate")) == ([1, 3], [3])
    assert liar.got(Refused) == []
    assert_moved_by(stage, first, 3.0)


def test_quarantine_survives_a_restart(stage: Stage) -> None:
    stage.fake("a")
    liar = stage.fake("b", poisoned)
    stage.start(devices=2, rounds=50, robust={"strikes": 1})
    stage.drive(lambda: bool(liar.got(Refused)))
    stage.stop()
    stage.fakes.remove(liar)
    back = stage.fake("b")
    stage.start(resume=True, rounds=50)
    stage.drive(lambda: bool(back.got(Refused)))
    assert back.tasks() == []


def test_failures_are_no_strikes(stage: Stage) -> None:
    stage.fake("a")
    unable = stage.fake("b", lambda device, task: device.fail(task, "out of memory"))
    stage.start(devices=2, rounds=3, robust={"strikes": 1})
    assert stage.finish() == "finished"
    assert unable.tasks() == [1, 2, 3]
    assert stage.store.strikes.read_all("r") == []


def test_no_noise_is_no_privacy_and_no_other_bit(stage: Stage, first: Tensors) -> None:
    """Weights by samples, nothing clipped: as in `test_updates_are_weighed_by_samples`, and no epsilon."""
    stage.fake("a", samples=1, value=0.0)
    stage.fake("b", samples=3, value=4.0)
    stage.start(devices=2, rounds=2, privacy={"noise_multiplier": 0.0, "clip": 1e-3})
    assert stage.finish() == "finished"
    assert_moved_by(stage, first, 6.0)
    assert all("dp_epsilon" not in entry.figures for entry in stage.store.rounds.read_all("r"))


def test_a_private_mean(stage: Stage, first: Tensors) -> None:
    """Two devices of equal updates: each is shortened to norm 1, and all of it moves the model by about that."""
    for name in ("a", "b"):
        stage.fake(name, value=100.0)
    stage.start(devices=2, rounds=2, privacy={"noise_multiplier": 1e-3, "clip": 1.0})
    assert stage.finish() == "finished"
    updated = np.sqrt(sum(float(np.square(stage.model()[name] - value).sum()) for name, value in first.items()))
    assert updated == pytest.approx(2.0, rel=0.05)
    told = [entry.figures["dp_epsilon"] for entry in stage.store.rounds.read_all("r")]
    assert told[1] > told[0] > 0
