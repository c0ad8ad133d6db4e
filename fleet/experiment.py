"""`fleet experiment`: a grid of methods, partitions and seeds from one file, compared on equal terms."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from coordinator.rounds.display import Display, choose_display
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError, FedvitError, StorageFailed
from fedvit.files import atomic_write
from fleet.experiments.cell import CellFolder
from fleet.experiments.grid import Cell, Grid, Search, as_text, read_grid
from fleet.experiments.outcome import Outcome, make_outcome
from fleet.experiments.scheduler import CellJob, CellProcess, run_cells
from fleet.experiments.search import Schedule, planned_rounds, search_state
from profiles.probes.host import usable_cores
from profiles.report.console import Console

RESULTS = ("results.json", "results.md", "report.html")
LINE_EVERY_S = 60.0


@click.command(
    "experiment",
    cls=Command,
    examples=[
        "fleet experiment digits.toml --dry-run",
        "fleet experiment digits.toml --only 'fedavg/*'",
    ],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dataset", metavar="NAME|PATH", help="Data set in place of the one that FILE names.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for everything.  [default: experiments/NAME]")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Cells that run at the same time.  [default: 1; with --ray as many as fit on the nodes]",
)
@click.option("--ray", "address", metavar="HOST:PORT|local", help="Run cells on the nodes of a Ray cluster.")
@click.option(
    "--only", multiple=True, metavar="METHOD/PARTITION", help="Only these cells; * stands for any. Repeatable."
)
@click.option("--keep", is_flag=True, help="Keep what devices stored, also of cells that are finished.")
@click.option("--dry-run", is_flag=True, help="Check the file, list the cells, run nothing.")
@json_flag
def experiment_command(
    file: Path,
    dataset: str | None,
    out: Path | None,
    jobs: int | None,
    address: str | None,
    only: tuple[str, ...],
    keep: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the grid that FILE describes, over a network in memory; finished cells are not run again."""
    grid = read_grid(file, dataset)
    out = out or Path("experiments") / grid.name
    mine = chosen(grid, only)
    if dry_run:
        _list(mine, out, as_json)
        return
    lock = _lock(out)
    schedule = Schedule(mine, out)
    first = schedule.runnable()
    try:
        with (
            choose_display(quiet=as_json) as display,
            _launcher(address, grid, first, jobs, display, keep=keep) as launcher,
        ):
            run_cells(
                first,
                jobs=launcher.jobs,
                at_once=launcher.at_once,
                launch=launcher.launch,
                display=display,
                line_every_s=None if sys.stderr.isatty() else LINE_EVERY_S,
                ended=schedule.add,
                ahead=schedule.ahead,
            )
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
    if as_json:
        click.echo(msgspec.json.encode(outcome).decode())
    elif outcome.has_figures:
        from fleet.experiments.report import terminal_report

        Console().print(terminal_report(outcome))
        click.echo(f"written: {', '.join(str(out / name) for name in RESULTS)}")
    if failed := [entry for entry in schedule.over.values() if entry.failure]:
        raise FedvitError(
            f"{len(failed)} of {schedule.total()} cells failed, the first: {failed[0].cell.path}: {failed[0].failure}"
        )
    for search in mine.searches:
        at = search_state(search, schedule.over)
        if at.over and not at.chosen:
            raise FedvitError(
                f"{search.method}/{search.partition}: no device could train with any of the values that were tried;"
                f" {as_text(search.points[0].values)}: {at.tries[0].unusable}"
            )


class Launcher(NamedTuple):
    """How cells are started."""

    launch: Callable[[CellFolder], CellJob]
    jobs: int  # most cells that are launched at a time
    at_once: int  # of them, those that can compute at the same time


@contextmanager
def _launcher(
    address: str | None, grid: Grid, folders: list[CellFolder], jobs: int | None, display: Display, *, keep: bool
) -> Iterator[Launcher]:
    """In processes of this machine, or on the cluster of that address. Raises ConfigError, LinkDown."""
    metrics = grid.experiment.trackers
    if address is None:
        jobs = jobs or 1
        cores = max(1, usable_cores() // jobs)
        yield Launcher(partial(CellProcess, at_once=cores, keep=keep, metrics=metrics), jobs, jobs)
        return
    from fleet.clusters.cells import CellsOnRay
    from fleet.clusters.cluster import connected

    with connected(address) as cluster:
        cells = CellsOnRay(cluster, grid.experiment.ray, display, keep=keep, metrics=metrics)
        waiting = [folder for folder in folders if folder.result() is None]
        cells.check(waiting)
        at_once = cluster.at_once([cells.resources(folder) for folder in waiting])
        # without --jobs Ray gets all waiting cells, since it knows which of them fits on which node next
        jobs = jobs or max(1, len(waiting))
        yield Launcher(cells, jobs, max(1, min(jobs, at_once)))


def chosen(grid: Grid, only: tuple[str, ...]) -> Grid:
    """The cells and searches that one of the patterns names; all where there is none. Raises ConfigError for an idle
    pattern."""
    every: list[Cell | Search] = [*grid.cells, *grid.searches]
    names = sorted({f"{one.method}/{one.partition}" for one in every})
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"--only {pattern!r} names no cell; there are: {', '.join(names)}")

    def is_meant(one: Cell | Search) -> bool:
        return not only or any(fnmatchcase(f"{one.method}/{one.partition}", pattern) for pattern in only)

    return grid._replace(cells=tuple(filter(is_meant, grid.cells)), searches=tuple(filter(is_meant, grid.searches)))


def write_results(outcome: Outcome, out: Path) -> None:
    """Write RESULTS. Raises StorageFailed."""
    from fleet.experiments.report import html_report, markdown_report  # imports matplotlib, which takes a second

    contents = (
        msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n",
        markdown_report(outcome).encode(),
        html_report(outcome).encode(),
    )
    for name, content in zip(RESULTS, contents, strict=True):
        atomic_write(out / name, content)


def _list(grid: Grid, out: Path, as_json: bool) -> None:
    """The cells that can run now, those that are finished, and what searches cost."""
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
        chosen = search_state(search, schedule.over).chosen
        click.echo(
            f"{search.method}/{search.partition}: search among {len(search.points)} points: {steps}"
            f"{f'; chosen: {as_text(chosen.values)}' if chosen else ''}"
        )
        planned = planned_rounds(search)
        cells, rounds = cells + len(planned), rounds + sum(planned)
    total = schedule.total()
    click.echo(
        f"{total - cells} cells of {grid.experiment.rounds} rounds on {grid.experiment.devices} devices, "
        + (f"{cells} cells of a search with {rounds} rounds in all, " if cells else "")
        + f"{total - len(schedule.over)} to run"
    )


def _lock(out: Path) -> int:
    """Only one process works in a folder. Raises ConfigError when another does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process uses {out}") from None
    except OSError as error:
        raise StorageFailed(f"cannot use {out}: {error.strerror}") from error
    return handle
