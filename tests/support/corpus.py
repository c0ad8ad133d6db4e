"""Valid messages of every type about a current run, from which damage starts."""

from typing import Any

import msgspec

from fedvit.resources import Budget, DeviceProfile, ProductRate, ResourceUse, Speed
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobPut,
    BlobUrl,
    Cancel,
    CoordinatorState,
    Declined,
    DeltaStep,
    DeviceState,
    Extended,
    Failed,
    Hello,
    Manifest,
    ModelReport,
    Models,
    Progress,
    Refused,
    Result,
    ResultAck,
    RunEnded,
    SumAsk,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumMasked,
    SumNoise,
    SumPeers,
    SumPublicKeys,
    SumRefused,
    SumReveal,
    SumShares,
    SumSigned,
    SumSurvivors,
    SumTerms,
    Task,
    UrlPiece,
    UseDedicatedTopic,
    Welcome,
)

RUN = "fuzz"
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05},
    "model_options": {"image_size": 8, "patch_size": 8, "width": 4, "depth": 1, "heads": 1},
    "devices": 2,
    "rounds": 100_000,
    "evaluate_every": 3,
    "accelerator": "cpu",
    "deadline_s": 3.0,
    "rejoin_grace_s": 0.5,
}

SPEED = Speed(
    threads=1,
    products=(ProductRate("weights", 1, 200, 768, 3072, 2.5e10), ProductRate("attention", 24, 197, 64, 197, 1e10)),
    bytes_per_s={"Add": 3.5e9, "Softmax": 7.5e8},
    node_s=1.5e-6,
)
PROFILE = DeviceProfile(
    host="hostile",
    machine="x86_64",
    cores=4,
    threads=1,
    ram_bytes=2**32,
    board="Raspberry Pi 4 Model B Rev 1.4",
    base_rss_bytes=50_000_000,
    free_disk_bytes=2**34,
    speed=SPEED,
    budget=Budget(memory_bytes=2**32, flops_per_round=2 * 10**14, round_deadline_s=600.0, upload_bytes=2**30),
)
USE = ResourceUse(
    train_s=12.5, step_s=0.25, steps=40, flops=10**12, peak_rss_bytes=2**28, received_bytes=5, sent_bytes=6,
    fetched_bytes=7, upload_bytes=8, sustained=1.1, energy_j=60.5, energy_source="ina3221 VDD_IN", temperature_c=71.5,
    throttled=True, broke=("time", "memory"),
)  # fmt: skip


KEYS = SumPublicKeys(bytes(range(32)), bytes(32), bytes(range(16)), b"certificate", b"signature")


def make_hello(instance: str, classes: tuple[str, ...]) -> Hello:
    return Hello(instance, "0.1.0", PROFILE, classes, 120, 30, {"site": "berlin"}, 1)


def list_device_messages(instance: str, classes: tuple[str, ...], task: Task, upload: Manifest) -> list[AnyMessage]:
    """List messages that a device with `task` could send."""
    run, number = task.run, task.round
    return [
        make_hello(instance, classes),
        make_hello(instance, classes),  # twice: it has the most fields
        msgspec.structs.replace(make_hello(instance, ()), class_list=upload),
        DeviceState(instance, online=False, connection=1),
        Progress(run, number, "train", 12, 40, 0.5, task.task),
        Result(run, number, "train", 120, {"loss": 0.25}, USE, upload, task=task.task, program=task.program),
        Result(run, number, "train", 120, {"loss": 0.25}, USE, upload, b"not what was announced"),
        Result(run, number, "evaluate", 30, {"correct": 12.0}, USE),
        Result(run, number, "compare", 30, {"both": 20.0, "challenger": 5.0, "champion": 1.0, "neither": 4.0}, USE),
        ModelReport(instance, {f"{run}-{number}": "canary"}, f"{run}-{number}", "", "", 12, 9.5, has_drifted=True),
        Failed(run, number, "train", "no memory", "memory", USE, task.task),
        Declined(run, number, "train", "hot: 71.5 C", 0.05, task.task),
        BlobNack(task.program, ((0, 1),), 1),
        BlobNack(task.blobs[0].digest, ((0, 1),), 1, stalled=True),
        BlobNack(task.blobs[-1].digest, ((0, 1),), 1, apart=True),
        BlobNack(task.blobs[-1].digest, ((0, 1),), 1, url="ask"),
        BlobPut(upload.digest, 0, 1, stored=True),
        BlobAck(upload.digest),
        BlobAck(task.program),
        SumKeys(name_sum(task), KEYS, bytes(32)),
        SumShares(name_sum(task), {"a": bytes(82)}, bytes(32)),
        SumMasked(name_sum(task), upload),
        SumMasked(name_sum(task), upload, b"masked"),
        SumSigned(name_sum(task), b"signature"),
        SumReveal(name_sum(task), {"a": bytes(33)}),
        SumRefused(name_sum(task), "its numbers are in a sum already"),
    ]


def list_coordinator_messages(instance: str, task: Task, stored: str) -> list[AnyMessage]:
    """List messages that a coordinator could send; `stored` is the digest of a blob that the device has."""
    return [
        CoordinatorState(task.epoch, True, "owner", task.run, "host", 1.5e9),
        Welcome(instance, task.epoch, "round 1/2: train"),
        Refused("another instance", "unknown class", final=False),
        task,
        task,  # twice: it has the most fields
        _add_delta_chain(task, stored),
        Extended(task.run, task.round, task.kind, 60.0),
        Cancel(task.run, task.round, task.kind, "the round is over"),
        ResultAck(task.run, task.round, task.kind, accepted=True),
        ResultAck(task.run, task.round, task.kind, accepted=False, reason="another run is served", keep=True),
        RunEnded(task.run, "finished", task.round),
        Models(instance, task.epoch, {f"{task.run}-{task.round}": "canary", "other-1": "champion"}),
        BlobNack(stored, ((0, 1),), 1),
        BlobNack(stored, ((0, 1),), 1, put=UrlPiece("http://127.0.0.1:9/b/1?X=1", 0, 1)),
        BlobUrl(stored, "http://127.0.0.1:9/b/1?X=1"),
        BlobAck(stored),
        UseDedicatedTopic(task.blobs[0].digest),
        SumInvite(name_sum(task), SumTerms(task.program, 4, 2, 24, 2.5, 463, SumNoise(1.0, 0.8, 2.5))),
        SumPeers(name_sum(task), {"a": bytes(range(16)), "b": bytes(16)}, {"a": KEYS, "b": KEYS}),
        SumInbox(name_sum(task), {"b": bytes(82)}),
        SumSurvivors(name_sum(task), b"\xc0"),
        SumAsk(name_sum(task), {"b": b"signature"}),
    ]


def name_sum(task: Task) -> SumId:
    return SumId(task.run, task.round, task.kind, 1)


def _add_delta_chain(task: Task, base: str) -> Task:
    """Add a recipe for one of the task's groups, from a blob that the device has, and bytes that nobody described."""
    [target, *_] = task.groups.values()
    return msgspec.structs.replace(task, inline=(b"small",), recipes=(DeltaStep(target, base, task.blobs[-1], "fp16"),))
