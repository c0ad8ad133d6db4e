"""Records of runs made by hand."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from coordinator.record.liveness import STATUS_FILE
from coordinator.record.record import Record, open_record
from coordinator.record.tables import ANNOUNCED, SUM, RefusalRecord, SavedState, TaskRecord
from coordinator.rounds.status import MEMBERS, AtWork, LiveStatus, Member, read_status
from coordinator.run_view import RunLine, RunView
from fedvit.resources import Budget, ResourceUse
from fedvit.wire.messages import Manifest, Result
from profiles.prediction import Expected, Prediction

RUN = "20261121-034500-eftvit-ab12"
PROTOCOL = "tested as the planner said"
DIGEST = "blake3:" + "5" * 64
CONFIG: dict[str, Any] = {"method": "fedavg", "options": {"lr": 0.5}, "cohort": 1.0, "devices": 1, "classes": ["a"]}


def reopen(store: Record) -> Record:
    """Open a record again, as the next process does."""
    store.close()
    assert store.database.folder
    return open_record(store.database.folder)


def make_result(number: int = 1, **changes: Any) -> Result:
    """Make a training result of run `r` in which no field has its default."""
    use = ResourceUse(
        train_s=1.5, step_s=0.25, steps=6, flops=10**15, peak_rss_bytes=2**40, received_bytes=1, sent_bytes=2
    )
    result = Result("r", number, "train", 20, {"loss": 0.125, "other": 1e-300}, use, Manifest(DIGEST, 100, 1024))
    return msgspec.structs.replace(result, **changes)


def add_result(store: Record, device: str, result: Result, used_in: int | None = None) -> None:
    """Store one accepted result."""
    store.tasks.add_results([(device, result, used_in)])


def trained(store: Record, number: int, device: str, samples: int = 10, loss: float = 1.0, **use: Any) -> None:
    add_result(store, device, Result(RUN, number, "train", samples, {"loss": loss}, ResourceUse(**use)))


def evaluated(store: Record, number: int, device: str, right: int, samples: int, **use: Any) -> None:
    metrics = {"correct": float(right)}
    add_result(store, device, Result(RUN, number, "evaluate", samples, metrics, ResourceUse(**use)))


def begin_run(folder: Path) -> Record:
    """A run of three planned rounds; two are over, the first was evaluated, the second was not."""
    made = open_record(folder)
    config = {"method": "eftvit", "model": "vit_small_images", "seed": 7, "rounds": 3}
    made.runs.create(RUN, config)
    made.runs.update(RUN, status="running", classes=["ant", "bee"], protocol=PROTOCOL)
    made.rounds.open(RUN, 1, ["a", "b", "c"])
    trained(
        made, 1, "a", 30, 1.0,
        step_s=0.010, steps=4, flops=400, peak_rss_bytes=100_000_000, received_bytes=5_000_000, sent_bytes=1_000_000,
    )  # fmt: skip
    trained(made, 1, "b", 10, 2.0, step_s=0.030, flops=100, received_bytes=5_000_000, sent_bytes=2_000_000)
    evaluated(made, 1, "a", 9, 10, received_bytes=1_000_000, sent_bytes=100_000, peak_rss_bytes=120_000_000)
    evaluated(made, 1, "b", 1, 2)
    evaluated(made, 1, "c", 7, 20)
    evaluated(made, 1, "d", 0, 0)
    made.rounds.close(RUN, 1, SavedState({}, None, {}), {"devices_s": 2.5, "server_s": 0.5})
    made.rounds.close_evaluation(RUN, 1)
    made.rounds.open(RUN, 2, ["a", "b"])
    trained(made, 2, "a", 30, 0.5, step_s=0.020, flops=600)
    made.devices.add_refusal(RUN, RefusalRecord(1, "c", "train", "no result: deadline", lost=True))
    made.devices.add_refusal(RUN, RefusalRecord(None, "e", "hello", "its class folder [wasp] is unknown [/b]"))
    return made


def line(run: RunView) -> RunLine:
    """Of a summary, as the list of runs has it."""
    fields = {name: getattr(run, name) for name in RunLine.__struct_fields__ if name not in ("rounds", "bytes")}
    return RunLine(rounds=len(run.rounds), bytes=123_456_789, **fields)


def make_summed_run(folder: Path) -> Record:
    """A run of two rounds with secure sums; the first sum lost two devices, and the second one an attempt."""
    made = open_record(folder)
    made.runs.create(RUN, {"method": "fedavg", "model": "vit_tiny", "secure": True, "rounds": 2})
    for number, summed, figures in (
        (1, 10, {"sum_attempt": 1.0, "sum_left_shares": 1.0, "sum_left_masked": 1.0, "sum_clipped": 3.0}),
        (2, 12, {"sum_attempt": 2.0, "sum_left_reveal": 2.0, "sum_clipped": 0.0}),
    ):
        names = [name_of(place) for place in range(1, 13)]
        made.rounds.open(RUN, number, names)
        for name in names:
            add_result(made, name, Result(RUN, number, "train", 0, {ANNOUNCED: 20.0}, ResourceUse()))
        metrics = {"devices": float(summed), "loss": 0.5}
        add_result(made, SUM, Result(RUN, number, "train", 20 * summed, metrics, ResourceUse()))
        figures = {"sum_devices": float(summed), "sum_error_bound": 1e-6, **figures}
        made.rounds.close(RUN, number, SavedState({}, None, {}), figures)
    return made


SUM_LINES = [
    "secure sums of updates, images, losses and right answers; revealed of a single device: none",
    "updates of 10 to 12 devices in each of 2 sums; devices that left, by step: keys 0, shares 1, masked 1, agree 0, "
    "reveal 2; attempts that failed: 1",
]
"""Description of the sums of `make_summed_run` in every view."""


# --- a large fleet --------------------------------------------------------------------------------------

FLEET_RUN = "20261121-060000-fedavg-cd34"
MARKUP = "pi-0<img src=x onerror=document.title='broken'>"
"""A name that no device can have over the wire, and that a page must show as text all the same."""


def name_of(number: int) -> str:
    return MARKUP if number == 0 else f"pi-{number}"


def fleet_run(folder: Path, devices: int = 500, rounds: int = 3, refusals: int = 3000) -> Record:
    """A run of many devices, by the calls of a coordinator: `rounds` are over, another is open; half of its devices
    are at work, every tenth has left, two have strikes and one is in quarantine."""
    made, names = open_record(folder), [name_of(number) for number in range(devices)]
    made.runs.create(FLEET_RUN, {"method": "fedavg", "model": "vit_tiny", "seed": 1, "rounds": rounds + 5, "lr": 0.5})
    made.runs.update(FLEET_RUN, status="running", classes=["ant", "bee"], protocol=PROTOCOL)
    for number in range(1, rounds + 2):
        made.rounds.open(FLEET_RUN, number, names)
        made.tasks.add(FLEET_RUN, [TaskRecord(number, name, "blake3:program", {}, expected(name)) for name in names])
        answering = names if number <= rounds else names[: devices // 2]
        made.tasks.add_results([(name, _training(number, place), None) for place, name in enumerate(answering)])
        if number <= rounds:
            figures = {"devices_s": 20.0 + number, "server_s": 1.5}
            made.rounds.close(FLEET_RUN, number, SavedState({}, None, {}), figures)
            made.tasks.add_results([(name, _evaluation(number, place), None) for place, name in enumerate(names)])
            made.rounds.close_evaluation(FLEET_RUN, number)
    with made.database.together():
        for number in range(refusals):
            made.devices.add_refusal(
                FLEET_RUN, RefusalRecord(1 + number % rounds, names[number % 7], "train", "a number is not finite <b>")
            )
    for number in (1, 2):
        made.strikes.add(FLEET_RUN, number, names[2], "a number is not finite")
    made.strikes.add(FLEET_RUN, 1, names[3], "a number is not finite")
    made.strikes.add_quarantine(FLEET_RUN, names[3], 1, None, "1 strike")
    write_members(folder / FLEET_RUN, names)
    write_status(folder / FLEET_RUN, names[devices // 2 :], rounds + 1)
    return made


def write_members(folder: Path, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    members = [
        Member(
            device=name, online=place % 10 != 9, since=at, seen=at,
            board=("Raspberry Pi 5", "Raspberry Pi 4")[place % 2],
            host=f"host-{place}", machine="aarch64", cores=4, ram_bytes=8 << 30, memory_budget_bytes=512_000_000,
            software="fedvit 0.1.0", labels={"site": ("north", "south")[place % 2]},
        )
        for place, name in enumerate(names)
    ]  # fmt: skip
    (folder / MEMBERS).write_bytes(msgspec.json.encode(members))


def write_status(folder: Path, waiting: Sequence[str] = (), number: int = 0, **changes: Any) -> None:
    """Write a status of now; without devices, the one that is there with `changes`."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    awaited = [
        AtWork(
            device=name, round=number, kind="train", state="working", done_steps=3, total_steps=40, since=at, until=at
        )
        for name in waiting
    ]
    status = LiveStatus(at=at, doing=f"round {number}: train", waiting_for=awaited, backing_off=[], online=len(waiting))
    if not waiting:
        status = msgspec.structs.replace(read_status(folder), at=at, **changes)
    fresh = folder / "status.new"
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(folder / STATUS_FILE)


def expected(device: str) -> Expected:
    prediction = Prediction(
        device=device, source="measured", mode=None, step_s=0.02, train_s=8.0, evaluate_s=1.0, bound="products",
        memory=[], peak_rss_bytes=400_000_000, energy_j=None, power_w=None, over=(),
    )  # fmt: skip
    return Expected(
        prediction=prediction, flops=10**9, bytes_down=10**6, bytes_up=10**5, budget=Budget(memory_bytes=512_000_000)
    )


def _training(number: int, place: int) -> Result:
    use = ResourceUse(
        train_s=0.001 * (1 + place % 9), step_s=0.01 + 0.0001 * place, steps=40, flops=10**9,
        peak_rss_bytes=300_000_000 + 1000 * place, received_bytes=10**6, sent_bytes=10**5, upload_bytes=10**5,
        energy_j=2.5, energy_source="ina219", temperature_c=40.0 + place % 45, throttled=place % 40 == 0,
    )  # fmt: skip
    return Result(FLEET_RUN, number, "train", 30, {"loss": 1.0 / number}, use)


def _evaluation(number: int, place: int) -> Result:
    right = {"correct": float(min(10, number + place % 7))}
    return Result(FLEET_RUN, number, "evaluate", 10, right, ResourceUse())
