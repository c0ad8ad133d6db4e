"""`bench simulate`: rounds per second of a simulated federation, compared with a plain PyTorch loop over clients.

Three sides run the same job on the same device folders, each in its own process, in turn: `onnx` and `torch` are
`fleet.simulate` with fedvit's two engines, `loop` is what a user of PFLlib or FL-bench runs. All start with the same
weights and train the same devices in each round; each draws its own order of images.

`rounds_per_s` is N divided by the seconds from the end of round k to the end of round k + N. Round k is the first after
which every device has trained once, N is `--rounds`. So it excludes start-up, the export of graphs, compilation and the
decoding of images, which happen at the start or when a device first trains, and the test after the last round. A round
of `loop` ends when its average is computed (on CUDA: when the accelerator is done). A round of fedvit ends when the
server's new state is saved, so its time includes the writing of uploads and states. fedvit's devices compute in
parallel, one per core. The loop on the processor is run with several numbers of torch's threads, and the fastest is
reported, since on shared cores more threads may slow a small model down. `peak_rss_bytes` is of the whole process on
the host. `accuracy` is the mean over devices of the accuracy on their own test images after round k + N.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median

import msgspec
from msgspec import Struct
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.child import run_child
from bench.machine import Machine, this_machine
from bench.simulate.jobs import COHORT, SEED, Job, Measured, encode_job, rounds_until_all_were_asked
from fedvit.errors import FedvitError
from profiles.probes.host import usable_cores

ENGINES = ("onnx", "torch")
SIDES = (*ENGINES, "loop")
TOLERANCE = 0.05
"""Largest difference of accuracies that agree: sides draw different batches, and a device has few test images."""
MEGA = 1e6

Progress = Callable[[str], None]


class Side(Struct, frozen=True, kw_only=True):
    """One side of a case. Figures are None when it was not run or failed, with `reason`."""

    rounds_per_s: float | None = None  # median over processes
    rounds_per_s_runs: tuple[float, ...] = ()  # one process each
    peak_rss_bytes: int | None = None  # the highest
    accuracy: float | None = None  # mean over processes
    threads: int | None = None  # torch's, of the loop
    reason: str | None = None


class CaseResult(Struct, frozen=True, kw_only=True):
    name: str
    rounds_before: int  # not counted: until every device has trained once
    onnx: Side
    torch: Side
    loop: Side
    accuracies_agree: bool | None  # within the tolerance; None: fewer than two are known

    def sides(self) -> dict[str, Side]:
        return {"onnx": self.onnx, "torch": self.torch, "loop": self.loop}


class SimulateReport(Struct, frozen=True, kw_only=True):
    """Figures of `bench simulate`."""

    machine: Machine
    accelerator: str  # of torch and loop; onnx computes on the processor
    precision: str  # of their products
    devices: int
    cohort: int
    images: int  # of all devices, training and test
    rounds: int  # counted ones in each process
    turns: int  # processes of each side
    accuracy_tolerance: float
    cases: list[CaseResult]


def run_simulate_bench(
    jobs: Sequence[Job],
    folders: Sequence[Path],
    *,
    images: int,
    rounds: int,
    turns: int,
    accelerator: str,
    precision: str,
    sides: Sequence[str],
    threads: Sequence[int] = (),
    progress: Progress = lambda line: None,
) -> SimulateReport:
    """Measure the sides of every job in turn, `turns` times, each in its own process.

    The loop is run with each number in `threads` and the fastest is reported; by default one, and one per core. A side
    that fails has a reason instead of figures.
    """
    threads = threads or sorted({1, usable_cores()} if accelerator == "cpu" else {usable_cores()})
    return SimulateReport(
        machine=this_machine(),
        accelerator=accelerator,
        precision=precision,
        devices=len(folders),
        cohort=COHORT,
        images=images,
        rounds=rounds,
        turns=turns,
        accuracy_tolerance=TOLERANCE,
        cases=[
            _measure(job, folders, rounds, turns, (accelerator, precision), sides, threads, progress) for job in jobs
        ],
    )


def _measure(
    job: Job,
    folders: Sequence[Path],
    rounds: int,
    turns: int,
    accelerator: tuple[str, str],  # and precision
    sides: Sequence[str],
    threads: Sequence[int],
    progress: Progress,
) -> CaseResult:
    before = rounds_until_all_were_asked([folder.name for folder in folders], job.cohort, SEED)
    job_arguments = (encode_job(job), str(before + rounds), str(SEED))
    commands: dict[tuple[str, int | None], tuple[str, ...]] = {
        (engine, None): ("bench.simulate.engine", *job_arguments, engine, *accelerator) for engine in ENGINES
    }
    commands |= {
        ("loop", count): ("bench.simulate.loop", *job_arguments, *accelerator, str(count)) for count in threads
    }
    runs: dict[tuple[str, int | None], list[Measured]] = {key: [] for key in commands}
    failed = {side: f"not run: --sides {','.join(sides)}" for side in SIDES if side not in sides}
    for turn in range(turns):
        for key, (module, *arguments) in commands.items():
            side, count = key
            if side in failed:
                continue
            what = f"{job.name}: {side}{f', threads {count}' if count else ''} {turn + 1}/{turns}"
            progress(f"{what}: {before + rounds} rounds")
            try:
                line = run_child(module, *arguments, *map(str, folders), what=f"{job.name}: {side}")
            except FedvitError as error:
                failed[side] = str(error)
                continue
            measured = msgspec.json.decode(line, type=Measured)
            runs[key].append(measured)
            progress(f"{what}: {rounds_per_s(measured, before):.3f} rounds a second")
    found = {
        side: Side(reason=failed[side])
        if side in failed
        else fastest(_side(measured, before, count) for (name, count), measured in runs.items() if name == side)
        for side in SIDES
    }
    return CaseResult(
        name=job.name,
        rounds_before=before,
        **found,
        accuracies_agree=agree([side.accuracy for side in found.values()]),
    )


def rounds_per_s(measured: Measured, before: int) -> float:
    """From the end of round `before` to the end of the last.

    >>> rounds_per_s(Measured(ended=[9.0, 10.0, 10.5, 11.0], accuracy=None, peak_rss_bytes=None), 2)
    2.0
    """
    return (len(measured.ended) - before) / (measured.ended[-1] - measured.ended[before - 1])


def _side(runs: Sequence[Measured], before: int, threads: int | None) -> Side:
    speeds = tuple(rounds_per_s(run, before) for run in runs)
    peaks = [run.peak_rss_bytes for run in runs if run.peak_rss_bytes is not None]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    return Side(
        rounds_per_s=median(speeds),
        rounds_per_s_runs=speeds,
        peak_rss_bytes=max(peaks, default=None),
        accuracy=mean(accuracies) if accuracies else None,
        threads=threads,
    )


def fastest(sides: Iterable[Side]) -> Side:
    """The fastest of the runs of one side with different numbers of threads.

    >>> fastest([Side(rounds_per_s=2.0, threads=1), Side(rounds_per_s=0.5, threads=2)]).threads
    1
    """
    return max(sides, key=lambda side: side.rounds_per_s or 0.0)


def agree(accuracies: Sequence[float | None]) -> bool | None:
    """Whether accuracies differ by at most TOLERANCE; None where fewer than two are known.

    >>> agree([0.31, None, 0.35]), agree([0.31, 0.4]), agree([0.31, None])
    (True, False, None)
    """
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    return max(known) - min(known) <= TOLERANCE if len(known) > 1 else None


# --- for a terminal -----------------------------------------------------------------------------------


def simulate_report(report: SimulateReport) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("case", "side", "rounds/s", "x loop", "peak MB", "accuracy"):
        table.add_column(heading, justify="left" if heading in ("case", "side") else "right", no_wrap=True)
    notes = []
    for case in report.cases:
        for name, side in case.sides().items():
            table.add_row(case.name if name == SIDES[0] else "", name, *_cells(side, case.loop))
            if side.reason:
                notes.append(f"{case.name}: {name}: {side.reason}")
            if side.threads:
                notes.append(f"{case.name}: {name}: threads of torch: {side.threads}")
        table.add_section()
        notes.append(f"{case.name}: {_agreement(case, report.accuracy_tolerance)}")
    machine = report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    notes += [
        f"{machine.cpu}, {machine.cores} cores; torch and loop on {report.accelerator}, {report.precision}; {versions}",
        f"{report.devices} devices with {report.images} images, {report.cohort} a round; "
        f"{report.rounds} rounds counted in each process, median of {report.turns}",
    ]
    return Group(table, *(Text(note, style="dim") for note in notes))


def _cells(side: Side, loop: Side) -> tuple[str, ...]:
    ratio = side.rounds_per_s / loop.rounds_per_s if side.rounds_per_s and loop.rounds_per_s else None
    return (
        _shown(side.rounds_per_s, "{:.3f}"),
        _shown(ratio, "{:.2f}"),
        _shown(side.peak_rss_bytes and side.peak_rss_bytes / MEGA, "{:.0f}"),
        _shown(side.accuracy, "{:.3f}"),
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _agreement(case: CaseResult, tolerance: float) -> str:
    if case.accuracies_agree is None:
        return "accuracies are not compared: fewer than two sides have one"
    known = {name: side.accuracy for name, side in case.sides().items() if side.accuracy is not None}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in known.items())
    return f"accuracies {'agree' if case.accuracies_agree else 'DISAGREE'} within {tolerance}: {figures}"
