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

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median

import msgspec
from msgspec import Struct

from bench.child import run_child
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from bench.simulate.jobs import COHORT, SEED, Job, Measured, encode_job, rounds_until_all_were_asked
from fedvit.errors import FedvitError
from profiles.probes.host import usable_cores

ENGINES = ("onnx", "torch")
SIDES = (*ENGINES, "loop")
TOLERANCE = 0.05
"""Largest difference of accuracies that agree: sides draw different batches, and a device has few test images."""


class SideFigures(Struct, frozen=True, kw_only=True):
    """One side of a case. Figures are None when it was not run or failed, with `reason`."""

    rounds_per_s: float | None = None  # median over processes
    rounds_per_s_runs: tuple[float, ...] = ()  # one process each
    peak_rss_bytes: int | None = None  # the highest
    accuracy: float | None = None  # mean over processes
    threads: int | None = None  # torch's, of the loop
    reason: str | None = None


class SimulateSettings(Struct, frozen=True, kw_only=True):
    images: int  # of all devices, training and test
    rounds: int  # counted ones in each process
    turns: int  # processes of each side
    accelerator: str  # of torch and loop; onnx computes on the processor
    precision: str  # of their products
    sides: tuple[str, ...] = SIDES
    threads: tuple[int, ...] = ()  # of the loop; by default one, and one per core


def run_simulate_bench(
    jobs: Sequence[Job], folders: Sequence[Path], settings: SimulateSettings, progress: Progress = lambda line: None
) -> Report:
    """Measure the sides of every job in turn, each in its own process.

    The loop is run with each number of threads, and the fastest is reported. A side that fails has a reason instead of
    figures.
    """
    if not settings.threads:
        threads = {1, usable_cores()} if settings.accelerator == "cpu" else {usable_cores()}
        settings = msgspec.structs.replace(settings, threads=tuple(sorted(threads)))
    return {
        "machine": describe_machine(),
        "accelerator": settings.accelerator,
        "precision": settings.precision,
        "devices": len(folders),
        "cohort": COHORT,
        "images": settings.images,
        "rounds": settings.rounds,
        "turns": settings.turns,
        "accuracy_tolerance": TOLERANCE,
        "cases": [_measure(job, folders, settings, progress) for job in jobs],
    }


def _measure(job: Job, folders: Sequence[Path], settings: SimulateSettings, progress: Progress) -> Report:
    rounds, turns, accelerator = settings.rounds, settings.turns, (settings.accelerator, settings.precision)
    before = rounds_until_all_were_asked([folder.name for folder in folders], job.cohort, SEED)
    job_arguments = (encode_job(job), str(before + rounds), str(SEED))
    commands: dict[tuple[str, int | None], tuple[str, ...]] = {
        (engine, None): ("bench.simulate.engine", *job_arguments, engine, *accelerator) for engine in ENGINES
    }
    commands |= {
        ("loop", count): ("bench.simulate.loop", *job_arguments, *accelerator, str(count)) for count in settings.threads
    }
    runs: dict[tuple[str, int | None], list[Measured]] = {key: [] for key in commands}
    failed = {side: f"not run: --sides {','.join(settings.sides)}" for side in SIDES if side not in settings.sides}
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
            progress(f"{what}: {measure_rate(measured, before):.3f} rounds a second")
    figures = {
        side: SideFigures(reason=failed[side])
        if side in failed
        else find_fastest(
            _summarize(measured, before, count) for (name, count), measured in runs.items() if name == side
        )
        for side in SIDES
    }
    accuracies = [side.accuracy for side in figures.values()]
    return {
        "name": job.name,
        "rounds_before": before,  # not counted: until every device has trained once
        **{name: msgspec.structs.asdict(side) for name, side in figures.items()},
        "accuracies_agree": agree(accuracies),
    }


def measure_rate(measured: Measured, before: int) -> float:
    """Return the rate from the end of round `before` to the end of the last.

    >>> measure_rate(Measured(ended=[9.0, 10.0, 10.5, 11.0], accuracy=None, peak_rss_bytes=None), 2)
    2.0
    """
    return (len(measured.ended) - before) / (measured.ended[-1] - measured.ended[before - 1])


def _summarize(runs: Sequence[Measured], before: int, threads: int | None) -> SideFigures:
    speeds = tuple(measure_rate(run, before) for run in runs)
    peaks = [run.peak_rss_bytes for run in runs if run.peak_rss_bytes is not None]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    return SideFigures(
        rounds_per_s=median(speeds),
        rounds_per_s_runs=speeds,
        peak_rss_bytes=max(peaks, default=None),
        accuracy=mean(accuracies) if accuracies else None,
        threads=threads,
    )


def find_fastest(sides: Iterable[SideFigures]) -> SideFigures:
    """Find the fastest of the runs of one side with different numbers of threads.

    >>> find_fastest([SideFigures(rounds_per_s=2.0, threads=1), SideFigures(rounds_per_s=0.5)]).threads
    1
    """
    return max(sides, key=lambda side: side.rounds_per_s or 0.0)


def agree(accuracies: Sequence[float | None]) -> bool | None:
    """Tell whether accuracies differ by at most TOLERANCE; None where fewer than two exist.

    >>> agree([0.31, None, 0.35]), agree([0.31, 0.4]), agree([0.31, None])
    (True, False, None)
    """
    values = [accuracy for accuracy in accuracies if accuracy is not None]
    return max(values) - min(values) <= TOLERANCE if len(values) > 1 else None
