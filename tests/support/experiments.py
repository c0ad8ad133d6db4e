"""Experiments whose cells run in the test's own process, one after the other; and that process as one to be killed."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.config import TrackersConfig
from coordinator.record.record import open_record
from coordinator.record.rounds import RecordedRounds
from coordinator.rounds.display import Display
from fleet.experiments.cell import run_cell
from fleet.experiments.cells import CellOptions
from fleet.experiments.folder import LOG_FILE, CellFolder, FinishedCell
from fleet.experiments.grid import Grid, plan_grid
from fleet.experiments.kept_results import KeptDifference
from fleet.experiments.outcome import make_outcome
from fleet.experiments.scheduler import CellLauncher, run_cells
from fleet.experiments.search import Schedule
from fleet.experiments.settings import read_experiment
from profiles.report.curves import Accuracy, RoundFigures
from profiles.report.experiment import CellResult, ExperimentOutcome, Interval


def write_file(partitions: Sequence[str], methods: Sequence[str], *, seeds: int = 2, more: str = "") -> str:
    """Write the file of an experiment whose results tests make up; the partition `even` is iid."""
    lines = ['dataset = "digits"', "image_size = 32", "devices = 3", "rounds = 2", f"seeds = {[*range(seeds)]}", more]
    for name in partitions:
        lines += [f"[partitions.{name}]", f'partition = "{"iid" if name == "even" else "dirichlet"}"']
    for name in methods:
        lines += [f"[methods.{name}]", f'method = "{name}"']
    return "\n".join(lines)


def written_experiment(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tiny.toml"
    file.write_text(text)
    return file


def read_grid(file: Path, dataset: str | None = None, pretrained: str | None = None) -> Grid:
    """Plan the grid of a file, as `fleet experiment` does."""
    return plan_grid(read_experiment(file, dataset, pretrained))


class Here:
    """A cell that runs in this process, at once."""

    def __init__(self, folder: CellFolder, graph_cache: Path, ran: list[str], metrics: TrackersConfig) -> None:
        ran.append(folder.cell.path)
        self._code = 0
        try:
            run_cell(folder.folder, folder.parts, CellOptions(at_once=1, metrics=metrics), graph_cache)
        except Exception as error:  # noqa: BLE001 - as it would leave a process
            (folder.folder / LOG_FILE).write_text(f"Traceback\n{type(error).__name__}: {error}\n")
            self._code = 1

    def code(self) -> int | None:
        return self._code

    def stop(self) -> None:
        pass


class Lines(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


class ExperimentRun(NamedTuple):
    outcome: ExperimentOutcome  # of this call's cells
    ran: list[str]  # cells
    lines: list[str]  # that were shown


def run_experiment(
    file: Path, out: Path, *, graph_cache: Path, begin: Callable[[CellFolder], None] = lambda folder: None
) -> ExperimentRun:
    """Run an experiment's file in this process; `begin` is called with each cell before it runs."""
    grid = read_grid(file)
    ran: list[str] = []
    schedule = Schedule(grid, out)
    shown = Lines()

    def launch(folder: CellFolder) -> Here:
        begin(folder)
        return Here(folder, graph_cache, ran, grid.experiment.trackers)

    run_cells(schedule.take_runnable(), schedule, CellLauncher(launch), shown)
    return ExperimentRun(make_outcome(grid, schedule.over.values()), ran, shown.lines)


def make_measured_outcome(grid: Grid, curves: Mapping[str, Sequence[float]]) -> ExperimentOutcome:
    """Make the outcome of cells with these accuracies in rounds 1, 2 ..., by a cell's path; other cells are missing."""
    return make_outcome(grid, [
        FinishedCell(cell, make_measured_result(curves[cell.path]), None) for cell in grid.cells if cell.path in curves
    ])  # fmt: skip


def make_measured_result(accuracies: Sequence[float]) -> CellResult:
    """The result of a cell with one device, whose accuracy in each round is given."""
    rounds = [
        RoundFigures(
            round=number, cohort=1, accepted=1, accuracy=Accuracy(mean=mean, std_over_devices=0.1, weighted=mean),
            train_loss=None, bytes_down=2e6, bytes_up=1e6, flops=None,
        )
        for number, mean in enumerate(accuracies, start=1)
    ]  # fmt: skip
    last = rounds[-1].accuracy
    assert last is not None
    return CellResult(
        digest="", software="1", protocol="p", accuracy=last, accuracy_by_device={"device-0": last.mean}, wall_s=10.0,
        bytes_down=2e6, bytes_up=1e6, flops=None, peak_rss_bytes=None, refusals=0, rounds=rounds,
    )  # fmt: skip


def make_difference(low: float, high: float, *, seeds: int = 5) -> KeptDifference:
    """The difference of method a to method b on partition p."""
    interval = Interval(low, high)
    return KeptDifference(
        method="a", reference="b", partition="p", seeds=seeds, mean=(low + high) / 2, interval=interval
    )


def main() -> None:
    """For `Forked`: run an experiment's file in a folder, with a folder of graphs; a cell that is named gets a kill -9
    when two rounds are closed and the third is about to be."""
    file, out, graph_cache, fatal = sys.argv[1:]
    close = RecordedRounds.close

    def begin(folder: CellFolder) -> None:
        def die_or_close(self: RecordedRounds, run: str, number: int, *arguments: Any, **more: Any) -> None:
            if number == 3 and folder.cell.path == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            close(self, run, number, *arguments, **more)

        RecordedRounds.close = die_or_close  # type: ignore[method-assign]

    run_experiment(Path(file), Path(out), graph_cache=Path(graph_cache), begin=begin)


def read_closed(home: Path) -> list[tuple[int, str]]:
    """Return the closed rounds of the run `run`, and when each was closed."""
    with open_record(home / "runs") as store:
        return [(entry.round, entry.closed_at) for entry in store.rounds.read_all("run") if entry.closed_at]
