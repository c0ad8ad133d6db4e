"""`python -m bench store`: costs of the record of a long run: a round, a resume, `coordinator runs` and `show`."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import linear_regression, median

import msgspec
import psutil
from msgspec import Struct
from rich import box
from rich.console import RenderableType
from rich.table import Table

from coordinator.config import RunConfig
from coordinator.record.backups import NOTED_SHARE, Accepted, Backups, Closed, Note
from coordinator.record.copies import notes_in
from coordinator.record.record import Record, open_record
from coordinator.record.tables import ResultRecord, SavedState, TaskRecord
from coordinator.rounds.round_line import round_line
from fedvit.errors import FedvitError
from fedvit.resources import Budget, ResourceUse
from fedvit.wire.messages import Manifest, Result
from fleet.processes import program
from profiles.prediction import Expected, MemoryPhase, Prediction

RUN = "long"
BATCH = 25
"""Results in one transaction: a cohort's results are stored in a few."""
MEASURED_ROUNDS = 20
WAITING = "waiting for"
"""The coordinator prints it when it has resumed."""
PATIENCE_S = 600.0
STARTS = 3


class StoreReport(Struct, frozen=True, kw_only=True):
    """Seconds of processes are from their start to their end, or until they print that they wait for devices."""

    rounds: int
    devices: int
    make_s: float
    database_bytes: int
    round_ms: float  # median: all calls of the record in one more round, and its notes
    round_cpu_ms: float  # processor time of that, mean
    copy_s: float  # to copy the record once, and read the copy as a whole
    copy_rounds: float  # rounds until the next copy
    rss_slope_bytes_per_round: float  # of this process, over the second half of the rounds
    resume_s: float  # `coordinator start --resume`, until it waits for devices
    resume_record_s: float  # of that, to open and read the record
    runs_s: float
    show_s: float
    runs_cpu_s: float  # processor time, which a busy machine changes less
    show_cpu_s: float
    status_s: float
    status_cpu_s: float


def run_store_bench(
    *, rounds: int = 10_000, devices: int = 100, progress: Callable[[str], None] = lambda line: None
) -> StoreReport:
    """Make a record of `rounds` rounds by the calls of a run, and measure. Raises FedvitError when a command fails."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
        out = Path(made) / "runs"
        names = [f"device-{number:04d}" for number in range(devices)]
        store = open_record(out)
        store.runs.create(RUN, msgspec.to_builtins(RunConfig(devices=devices, rounds=2 * rounds, accelerator="cpu")))
        store.runs.update(RUN, classes=["ant", "bee"], status="running")
        began, resident = time.monotonic(), list[int]()
        for number in range(1, rounds + 1):
            one_round(store, number, names, batch=devices)
            resident.append(psutil.Process().memory_info().rss)
            if number % max(1, rounds // 10) == 0:
                progress(f"{number} rounds of {devices} devices, {time.monotonic() - began:.0f} s")
        make_s = time.monotonic() - began
        following = range(rounds + 1, rounds + 1 + MEASURED_ROUNDS)
        backups = Backups(store, RUN, out / RUN, 1)
        copy_s = _timed(lambda: backups.after_round(rounds, last=True))
        began_cpu_s = time.process_time()
        times = [_timed(partial(one_round, store, number, names, backups=backups)) for number in following]
        cpu_s = time.process_time() - began_cpu_s
        noted = sum(file.stat().st_size for file in notes_in(out / RUN))
        copied = backups.copies()[-1].stat().st_size
        store.runs.update(RUN, status="interrupted")
        store.close()
        progress("starting processes")
        record_s = median(_timed(lambda: _resume(out)) for _ in range(STARTS))
        resumes = [_resume_process(out) for _ in range(STARTS)]
        runs = [_process(out, "runs") for _ in range(STARTS)]
        show = [_process(out, "show", RUN) for _ in range(STARTS)]
        status = [_process(out, "status", RUN) for _ in range(STARTS)]
        return StoreReport(
            rounds=rounds,
            devices=devices,
            make_s=make_s,
            database_bytes=sum(file.stat().st_size for file in out.glob("fedvit.db*")),
            round_ms=1000 * median(times),
            round_cpu_ms=1000 * cpu_s / MEASURED_ROUNDS,
            copy_s=copy_s,
            copy_rounds=NOTED_SHARE * copied / (noted / MEASURED_ROUNDS),
            rss_slope_bytes_per_round=slope(resident[len(resident) // 2 :]),
            resume_s=median(resumes),
            resume_record_s=record_s,
            runs_s=median(wall for wall, _ in runs),
            show_s=median(wall for wall, _ in show),
            runs_cpu_s=median(spent for _, spent in runs),
            show_cpu_s=median(spent for _, spent in show),
            status_s=median(wall for wall, _ in status),
            status_cpu_s=median(spent for _, spent in status),
        )


def one_round(
    store: Record,
    number: int,
    names: list[str],
    batch: int = BATCH,
    backups: Backups | None = None,
    run: str = RUN,
) -> None:
    """Make all calls of a coordinator to the record in one round, in its order, and its notes; `batch` results are
    stored in one transaction."""
    note: Callable[[Note], object] = backups.note if backups else lambda note: None
    store.tasks.read_used_in(run, number)  # none is there yet, except after a restart
    store.devices.read_quarantines(run)
    store.rounds.open(run, number, names, len(names))
    groups = dict.fromkeys(("head", "model", "prefix"), f"blake3:{number:064x}")
    store.tasks.add(run, [TaskRecord(number, name, "blake3:" + "5" * 64, groups, _expected(name)) for name in names])
    store.tasks.find_answered(run, number, "train")
    use = ResourceUse(train_s=12.5, step_s=0.25, steps=50, flops=10**12, peak_rss_bytes=2**28, received_bytes=10**6)
    manifest = Manifest(f"blake3:{number:064x}", 10**6, 2**16)
    for kind, metrics in (("train", {"loss": 1 / number}), ("evaluate", {"correct": 7.0, "loss": 0.5})):
        upload, kept = manifest if kind == "train" else None, list[ResultRecord]()
        for first in range(0, len(names), batch):
            some = names[first : first + batch]
            results = [Result(run, number, kind, 10, metrics, use, upload) for _ in some]  # type: ignore[arg-type]
            accepted: list[tuple[str, Result, int | None]] = [
                (name, result, number) for name, result in zip(some, results, strict=True)
            ]
            note(Accepted(number, names if kind == "train" and not first else None, len(names), accepted))
            kept += store.tasks.add_results(accepted)
        if kind == "train":
            store.tasks.read_used_in(run, number + 1)
            store.tasks.find_counted(run, number)
            store.devices.add_refusal(run, number, names[0], "train", "no result: deadline")
            figures = {"cohort": float(len(names)), "accepted": float(len(names)), "devices_s": 1.5, "server_s": 0.5}
            saved = SavedState(groups, None, {})
            asked = store.tasks.list_asked(run, number)
            note(Closed(number, asked, saved, figures))
            store.rounds.close(run, number, saved, figures, asked, results=kept)
            store.tasks.find_uploads_since(run, number)
            store.rounds.read(run, number)
            store.devices.read_quarantines(run)
            store.tasks.read_used_in(run, number, "evaluate")
            store.tasks.find_answered(run, number, "evaluate")
    store.rounds.close_evaluation(run, number, kept)
    round_line(store, run, number, number)


def _expected(name: str) -> Expected:
    phase = MemoryPhase(phase="train", parts={"software": 87_000_000, "weights": 5 * 10**6, "activations": 10**8})
    return Expected(
        prediction=Prediction(
            device=name, source="measured", mode=None, step_s=0.25, train_s=12.5, evaluate_s=1.5, bound="products",
            memory=[phase], peak_rss_bytes=phase.total_bytes, energy_j=None, power_w=None, over=(),
        ),
        flops=10**12, bytes_down=10**6, bytes_up=10**6, budget=Budget(memory_bytes=10**9),
    )  # fmt: skip


def _resume(out: Path) -> None:
    """All calls of a resume to the record before the first round."""
    store = open_record(out, check=False)
    store.runs.read_all()
    store.rounds.read_newest_closed(RUN)
    store.tasks.read_unanswered(RUN)
    store.rounds.read_open(RUN)
    store.rounds.read(RUN, store.rounds.find_last(RUN))
    store.close()


def _command(*arguments: str) -> list[str]:
    return [*program("coordinator.cli"), *arguments]


def _environment(out: Path) -> dict[str, str]:
    """With a cache folder for bytecode, as of an installed program; the first start fills it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(out.parent / "bytecode")}


def _process(out: Path, *arguments: str) -> tuple[float, float]:
    """Wall and processor seconds of one command."""
    before, began, command = os.times(), time.monotonic(), _command(*arguments, "--runs", str(out))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=_environment(out))
    wall, after = time.monotonic() - began, os.times()
    if ended.returncode:
        raise FedvitError(f"coordinator {arguments[0]} ended with code {ended.returncode}: {ended.stderr[-400:]}")
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return wall, spent


def _resume_process(out: Path) -> float:
    """Seconds from the start of `coordinator start --resume` until it waits for devices."""
    arguments = _command("start", "--resume", RUN, "--runs", str(out), "--broker.port", "0")
    began, lines = time.monotonic(), list[str]()
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(out)
    ) as coordinator:
        assert coordinator.stdout is not None
        try:
            for line in coordinator.stdout:
                lines.append(line)
                if WAITING in line:
                    return time.monotonic() - began
        finally:
            coordinator.send_signal(signal.SIGINT)
    raise FedvitError(f"the coordinator did not resume: {''.join(lines[-3:])[-400:]}")


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def slope(values: list[int]) -> float:
    """Of the line through the values (least squares); 0 for fewer than two."""
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def store_table(report: StoreReport) -> RenderableType:
    """For a terminal."""
    table = Table(box=box.SIMPLE_HEAD, title=f"the record of {report.rounds} rounds of {report.devices} devices")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for what, figure in (
        ("one more round", f"{report.round_ms:.1f} ms ({report.round_cpu_ms:.1f} ms of processor)"),
        (f"a copy, every {report.copy_rounds:.0f} rounds", f"{report.copy_s:.2f} s"),
        ("coordinator start --resume, until it waits", f"{report.resume_s:.2f} s"),
        ("of that the record", f"{report.resume_record_s:.2f} s"),
        ("coordinator runs", f"{report.runs_s:.2f} s ({report.runs_cpu_s:.2f} s of processor)"),
        ("coordinator show", f"{report.show_s:.2f} s ({report.show_cpu_s:.2f} s of processor)"),
        ("coordinator status", f"{report.status_s:.2f} s ({report.status_cpu_s:.2f} s of processor)"),
        ("memory, each round", f"{report.rss_slope_bytes_per_round:.0f} bytes"),
        ("database", f"{report.database_bytes / 1e6:.1f} MB"),
        ("to make it", f"{report.make_s:.0f} s"),
    ):
        table.add_row(what, figure)
    return table
