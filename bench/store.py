"""`python -m bench store`: costs of the record of a long run: a round, a resume, `coordinator runs` and `show`."""

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

from bench.child import time_command, time_work, with_bytecode
from bench.reporting import Progress, Report
from coordinator.config import RunConfig
from coordinator.record.backups import NOTED_SHARE, Accepted, Backups, Closed, Note
from coordinator.record.copies import notes_in
from coordinator.record.record import Record, open_record
from coordinator.record.rounds import RoundWork
from coordinator.record.tables import RefusalRecord, ResultRecord, SavedState, TaskRecord
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
STARTS = 3


def run_store_bench(*, rounds: int = 10_000, devices: int = 100, progress: Progress = lambda line: None) -> Report:
    """Make a record of `rounds` rounds by the calls of a run, and measure. Raises FedvitError when a command fails."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        out = Path(folder) / "runs"
        names = [f"device-{number:04d}" for number in range(devices)]
        store = open_record(out)
        store.runs.create(RUN, msgspec.to_builtins(RunConfig(devices=devices, rounds=2 * rounds, accelerator="cpu")))
        store.runs.update(RUN, classes=["ant", "bee"], status="running")
        began, resident = time.monotonic(), list[int]()
        for number in range(1, rounds + 1):
            write_round(store, number, names, batch=devices)
            resident.append(psutil.Process().memory_info().rss)
            if number % max(1, rounds // 10) == 0:
                progress(f"{number} rounds of {devices} devices, {time.monotonic() - began:.0f} s")
        make_s = time.monotonic() - began
        following = range(rounds + 1, rounds + 1 + MEASURED_ROUNDS)
        backups = Backups(store, RUN, out / RUN, 1)
        copy_s = time_work(lambda: backups.after_round(rounds, last=True))
        began_cpu_s = time.process_time()
        times = [time_work(partial(write_round, store, number, names, backups=backups)) for number in following]
        cpu_s = time.process_time() - began_cpu_s
        noted = sum(file.stat().st_size for file in notes_in(out / RUN))
        copied = backups.copies()[-1].stat().st_size
        store.runs.update(RUN, status="interrupted")
        store.close()
        progress("starting processes")
        record_s = median(time_work(lambda: _resume(out)) for _ in range(STARTS))
        resumes = [_time_resume(out) for _ in range(STARTS)]
        commands = {
            name: [time_command(out, name, *arguments) for _ in range(STARTS)]
            for name, *arguments in (("runs",), ("show", RUN), ("status", RUN))
        }
        return {
            "rounds": rounds,
            "devices": devices,
            "make_s": make_s,
            "database_bytes": sum(file.stat().st_size for file in out.glob("fedvit.db*")),
            "round_ms": 1000 * median(times),  # all calls of the record in one more round, and its notes
            "round_cpu_ms": 1000 * cpu_s / MEASURED_ROUNDS,
            "copy_s": copy_s,  # to copy the record once, and to read the copy as a whole
            "copy_rounds": NOTED_SHARE * copied / (noted / MEASURED_ROUNDS),  # rounds until the next copy
            "rss_slope_bytes_per_round": fit_slope(resident[len(resident) // 2 :]),  # of this process
            "resume_s": median(resumes),  # `coordinator start --resume`, until it waits for devices
            "resume_record_s": record_s,  # of that, to open and read the record
            **{f"{name}_s": median(wall for wall, _ in times) for name, times in commands.items()},
            **{f"{name}_cpu_s": median(spent for _, spent in times) for name, times in commands.items()},
        }


def write_round(
    store: Record, number: int, names: list[str], batch: int = BATCH, backups: Backups | None = None, run: str = RUN
) -> None:
    """Make all calls of a coordinator to the record in one round, in its order, and its notes; `batch` results are
    stored in one transaction."""
    note: Callable[[Note], object] = backups.note if backups else lambda note: None
    store.tasks.read_used_in(run, number)  # none is there yet, except after a restart
    store.strikes.read_quarantines(run)
    store.rounds.open(run, number, names, len(names))
    groups = dict.fromkeys(("head", "model", "prefix"), f"blake3:{number:064x}")
    store.tasks.add(
        run, [TaskRecord(number, name, "blake3:" + "5" * 64, groups, _make_expectation(name)) for name in names]
    )
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
            store.devices.add_refusal(run, RefusalRecord(number, names[0], "train", "no result: deadline"))
            figures = {"cohort": float(len(names)), "accepted": float(len(names)), "devices_s": 1.5, "server_s": 0.5}
            saved = SavedState(groups, None, {})
            asked = store.tasks.list_asked(run, number)
            note(Closed(number, asked, saved, figures))
            store.rounds.close(run, number, saved, figures, RoundWork(asked, kept))
            store.tasks.find_uploads_since(run, number)
            store.rounds.read(run, number)
            store.strikes.read_quarantines(run)
            store.tasks.read_used_in(run, number, "evaluate")
            store.tasks.find_answered(run, number, "evaluate")
    store.rounds.close_evaluation(run, number, kept)
    round_line(store, run, number, number)


def _make_expectation(name: str) -> Expected:
    phase = MemoryPhase(phase="train", parts={"software": 87_000_000, "weights": 5 * 10**6, "activations": 10**8})
    return Expected(
        prediction=Prediction(
            device=name, source="measured", mode=None, step_s=0.25, train_s=12.5, evaluate_s=1.5, bound="products",
            memory=[phase], peak_rss_bytes=phase.total_bytes, energy_j=None, power_w=None, over=(),
        ),
        flops=10**12, bytes_down=10**6, bytes_up=10**6, budget=Budget(memory_bytes=10**9),
    )  # fmt: skip


def _resume(out: Path) -> None:
    """Make all calls of a resume to the record before the first round."""
    with open_record(out, check=False) as store:
        store.runs.read_all()
        store.rounds.read_newest_closed(RUN)
        store.tasks.read_unanswered(RUN)
        store.rounds.read_open(RUN)
        store.rounds.read(RUN, store.rounds.find_last(RUN))


def _time_resume(out: Path) -> float:
    """Return seconds from the start of `coordinator start --resume` until it waits for devices."""
    words = [*program("coordinator.cli"), "start", "--resume", RUN, "--runs", str(out), "--broker.port", "0"]
    began, lines = time.monotonic(), list[str]()
    with subprocess.Popen(
        with_bytecode(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as coordinator:
        assert coordinator.stdout is not None
        try:
            for line in coordinator.stdout:
                lines.append(line)
                if WAITING in line:
                    return time.monotonic() - began
        finally:
            coordinator.send_signal(signal.SIGINT)
    raise FedvitError("FV0001", f"the coordinator did not resume: {''.join(lines[-3:])[-400:]}")


def fit_slope(values: list[int]) -> float:
    """Fit a line through the values by least squares; 0 for fewer than two."""
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0
