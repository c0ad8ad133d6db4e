"""The work of `fleet experiment`: cells that run, their results, and reports."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from shutil import which
from typing import NamedTuple

import click
import msgspec

from coordinator.rounds.display import Display, choose_display
from fedvit.errors import ConfigError, FedvitError, StorageFailed
from fedvit.files import atomic_write
from fleet.clusters.cluster import connect
from fleet.experiments.cell_process import CellProcess
from fleet.experiments.cells import CellOptions, Grid, GridCell, Search, as_text
from fleet.experiments.cells_on_ray import CellsOnRay
from fleet.experiments.folder import CellFolder
from fleet.experiments.grid import plan_grid
from fleet.experiments.outcome import make_outcome
from fleet.experiments.report import html_report, markdown_report, terminal_report
from fleet.experiments.scheduler import CellLauncher, run_cells
from fleet.experiments.search import Schedule, list_rounds, search_state
from fleet.experiments.settings import ExperimentFile
from fleet.request import Engine
from profiles.probes.host import usable_cores
from profiles.report.console import Console
from profiles.report.experiment import RESULTS_FILE, ExperimentOutcome

RESULTS = (RESULTS_FILE, "results.md", "report.html")
LINE_EVERY_S = 60.0


class ExperimentFlags(NamedTuple):
    """The command's flags."""

    out: Path | None
    jobs: int | None
    address: str | None  # of a Ray cluster
    only: tuple[str, ...]
    keep: bool
    compiles: bool
    dry_run: bool
    as_json: bool


def run_experiment(file: ExperimentFile, flags: ExperimentFlags) -> None:
    """Run the unfinished cells of an experiment, write RESULTS, and show them. Raises FedvitError if cells fail."""
    grid = plan_grid(file)
    out = flags.out or Path("experiments") / grid.name
    selection = select_cells(grid, flags.only)
    if flags.compiles:
        _check_compiler(grid.experiment.engine)
    if flags.dry_run:
        _list(selection, out, flags.as_json)
        return
    lock = _lock(out)
    schedule = Schedule(selection, out)
    try:
        _run_cells(grid, schedule, flags)
    except KeyboardInterrupt:
        over = [entry for entry in schedule.over.values() if not entry.failure]
        click.echo(
            f"interrupted, {len(over)} of {schedule.total()} cells are finished; the same command resumes", err=True
        )
        raise
    finally:
        outcome = make_outcome(grid, Schedule(grid, out, schedule.over.values()).read().over.values())
        if outcome.has_figures:
            write_results(outcome, out)
        os.close(lock)
    if flags.as_json:
        click.echo(msgspec.json.encode(outcome).decode())
    elif outcome.has_figures:
        Console().print(terminal_report(outcome))
        click.echo(f"written: {', '.join(str(out / name) for name in RESULTS)}")
    _check_ending(selection, schedule)


def _run_cells(grid: Grid, schedule: Schedule, flags: ExperimentFlags) -> None:
    first = schedule.take_runnable()
    line_every_s = None if sys.stderr.isatty() else LINE_EVERY_S
    with choose_display(quiet=flags.as_json) as display, _launcher(grid, first, display, flags) as launcher:
        run_cells(first, schedule, launcher, display, line_every_s=line_every_s)


def _check_ending(grid: Grid, schedule: Schedule) -> None:
    """Raises FedvitError for a cell that failed, and for a search without usable values."""
    if failed := [entry for entry in schedule.over.values() if entry.failure]:
        raise FedvitError(
            "FV2104",
            f"{len(failed)} of {schedule.total()} cells failed, the first: {failed[0].cell.path}: {failed[0].failure}",
        )
    for search in grid.searches:
        state = search_state(search, schedule.over)
        if state.over and not state.chosen:
            raise FedvitError(
                "FV2113",
                f"{search.method}/{search.partition}: no device could train with any of the values that were tried;"
                f" {as_text(search.points[0].values)}: {state.tries[0].unusable}",
            )


@contextmanager
def _launcher(
    grid: Grid, folders: list[CellFolder], display: Display, flags: ExperimentFlags
) -> Iterator[CellLauncher]:
    """Launch cells in processes of this machine, or on a cluster. Raises ConfigError, LinkDown."""
    jobs = flags.jobs or 1
    cores = max(1, usable_cores() // jobs)
    options = CellOptions(at_once=cores, keep=flags.keep, compiles=flags.compiles, metrics=grid.experiment.trackers)
    if flags.address is None:
        yield CellLauncher(partial(CellProcess, options=options), jobs, jobs)
        return
    with connect(flags.address) as cluster:
        cells = CellsOnRay(cluster, grid.experiment.ray, display, options)
        waiting = [folder for folder in folders if folder.result() is None]
        cells.check(waiting)
        at_once = cluster.at_once([cells.resources(folder) for folder in waiting])
        # without --jobs Ray gets all waiting cells, since it knows which of them fits on which node next
        jobs = flags.jobs or max(1, len(waiting))
        yield CellLauncher(cells, jobs, max(1, min(jobs, at_once)))


def select_cells(grid: Grid, only: tuple[str, ...]) -> Grid:
    """Select the cells and searches that one of the patterns names; all without patterns.

    Raises ConfigError for a pattern that names no cell.
    """
    every: list[GridCell | Search] = [*grid.cells, *grid.searches]
    names = sorted({f"{one.method}/{one.partition}" for one in every})
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError("FV2105", f"--only {pattern!r} names no cell; there are: {', '.join(names)}")

    def is_selected(one: GridCell | Search) -> bool:
        return not only or any(fnmatchcase(f"{one.method}/{one.partition}", pattern) for pattern in only)

    return grid._replace(
        cells=tuple(filter(is_selected, grid.cells)), searches=tuple(filter(is_selected, grid.searches))
    )


def _check_compiler(engine: Engine) -> None:
    if engine != "torch":
        raise ConfigError("FV2102", f"--compile is for an experiment with engine = 'torch', not {engine!r}")
    if not which(compiler := os.environ.get("CXX", "g++")):
        raise ConfigError("FV2102", f"--compile needs a C++ compiler, and there is no {compiler!r}")


def write_results(outcome: ExperimentOutcome, out: Path) -> None:
    """Write RESULTS. Raises StorageFailed."""
    contents = (
        msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n",
        markdown_report(outcome).encode(),
        html_report(outcome).encode(),
    )
    for name, content in zip(RESULTS, contents, strict=True):
        atomic_write(out / name, content)


def _list(grid: Grid, out: Path, as_json: bool) -> None:
    """Print the cells that can run now, those that are finished, and the costs of searches."""
    schedule = Schedule(grid, out).read()
    if as_json:
        cells_now = [
            {"method": cell.method, "partition": cell.partition, "seed": cell.seed, "path": cell.path,
             "finished": digest in schedule.over}
            for digest, cell in schedule.cells.items()
        ]  # fmt: skip
        click.echo(msgspec.json.encode(cells_now).decode())
        return
    for digest, cell in schedule.cells.items():
        click.echo(f"{cell.path}{'  finished' if digest in schedule.over else ''}")
    cells, rounds = 0, 0
    for search in grid.searches:
        steps = " then ".join(f"{rung.points} for {rung.rounds} rounds" for rung in search.rungs) or "nothing to try"
        state = search_state(search, schedule.over)
        beyond = f", up to {search.beyond} beyond an edge" if search.beyond else ""
        click.echo(
            f"{search.method}/{search.partition}: search among {len(search.points)} points: {steps}{beyond}"
            f"{f'; chosen: {as_text(state.chosen.values)}' if state.chosen else ''}"
        )
        planned = [*list_rounds(search), *(one.rounds for one in state.tries[len(search.points) :])]
        cells, rounds = cells + len(planned), rounds + sum(planned)
    total = schedule.total()
    click.echo(
        f"{total - cells} cells of {grid.experiment.rounds} rounds on {grid.experiment.devices} devices, "
        + (f"{cells} cells of a search with {rounds} rounds in all, " if cells else "")
        + f"{total - len(schedule.over)} to run"
    )


def _lock(out: Path) -> int:
    """Lock the folder, in which one process works at a time. Raises ConfigError when another does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError("FV2105", f"another process uses {out}") from None
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot use {out}: {error.strerror}") from error
    return handle
