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
from rich.console import Console

from coordinator.run.display import Display, choose_display
from fedvit.errors import ConfigError, FedvitError, StorageFailed
from fedvit.files import atomic_write
from fleet.experiments.cell import CellFolder
from fleet.experiments.conduct import CellProcess, Ended, Work, conduct
from fleet.experiments.grid import Cell, Grid, read_grid
from fleet.experiments.outcome import Outcome, make_outcome
from profiles.probes.host import usable_cores

RESULTS = ("results.json", "results.md", "report.html")
LINE_EVERY_S = 60.0


@click.command("experiment")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for everything.  [default: experiments/NAME]")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Cells that run side by side.  [default: 1; with --ray what nodes can take]",
)
@click.option("--ray", "address", metavar="HOST:PORT|local", help="Run cells on the nodes of a Ray cluster.")
@click.option(
    "--only", multiple=True, metavar="METHOD/PARTITION", help="Only these cells; * stands for any. Repeatable."
)
@click.option("--keep", is_flag=True, help="Keep what devices stored, also of cells that are finished.")
@click.option("--dry-run", is_flag=True, help="Check the file, list the cells, run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def experiment_command(
    file: Path,
    out: Path | None,
    jobs: int | None,
    address: str | None,
    only: tuple[str, ...],
    keep: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the grid that FILE describes, over a network in memory; finished cells are not run again."""
    grid = read_grid(file)
    out = out or Path("experiments") / grid.name
    cells = chosen(grid, only)
    places = [CellFolder(cell, out) for cell in cells]
    if dry_run:
        _list(grid, places)
        return
    lock = _lock(out)
    ended: list[Ended] = []
    try:
        with (
            choose_display(quiet=as_json) as display,
            _launching(address, grid, places, jobs, display, keep=keep) as launching,
        ):
            conduct(
                places,
                jobs=launching.jobs,
                at_once=launching.at_once,
                launch=launching.launch,
                display=display,
                line_every_s=None if sys.stderr.isatty() else LINE_EVERY_S,
                ended=ended.append,
            )
    except KeyboardInterrupt:
        finished = sum(entry.result is not None for entry in ended)
        click.echo(f"interrupted, {finished} of {len(cells)} cells are finished; the same command goes on", err=True)
        raise
    finally:
        outcome = make_outcome(grid, _with_others(grid, out, ended))
        if outcome.comparisons:
            write_results(outcome, out)
        os.close(lock)
    if as_json:
        click.echo(msgspec.json.encode(outcome))
    elif outcome.comparisons:
        from fleet.experiments.report import terminal_report

        Console().print(terminal_report(outcome))
        click.echo(f"written: {', '.join(str(out / name) for name in RESULTS)}")
    if failed := [entry for entry in ended if entry.failure]:
        raise FedvitError(
            f"{len(failed)} of {len(cells)} cells failed, the first: {failed[0].cell.path}: {failed[0].failure}"
        )


class Launching(NamedTuple):
    """How cells are begun."""

    launch: Callable[[CellFolder], Work]
    jobs: int  # cells that are launched and not over, at most
    at_once: int  # of them, those that can be at work


@contextmanager
def _launching(
    address: str | None, grid: Grid, places: list[CellFolder], jobs: int | None, display: Display, *, keep: bool
) -> Iterator[Launching]:
    """In processes of this machine, or on the cluster of that address. Raises ConfigError, LinkDown."""
    metrics = grid.experiment.metrics
    if address is None:
        jobs = jobs or 1
        cores = max(1, usable_cores() // jobs)
        yield Launching(partial(CellProcess, at_once=cores, keep=keep, metrics=metrics), jobs, jobs)
        return
    from fleet.clusters.cells import CellsOnRay
    from fleet.clusters.cluster import connected

    with connected(address) as cluster:
        cells = CellsOnRay(cluster, grid.experiment.ray, display, keep=keep, metrics=metrics)
        waiting = [place for place in places if place.result() is None]
        cells.check(waiting)
        at_once = cluster.at_once([cells.resources(place) for place in waiting])
        # all that wait are given to Ray, unless --jobs says otherwise: it knows which of them fits on which node next
        jobs = jobs or max(1, len(waiting))
        yield Launching(cells, jobs, max(1, min(jobs, at_once)))


def chosen(grid: Grid, only: tuple[str, ...]) -> list[Cell]:
    """The cells that one of the patterns names; all where there is none. Raises ConfigError for an idle pattern."""
    names = {f"{cell.method}/{cell.partition}" for cell in grid.cells}
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"--only {pattern!r} names no cell; there are: {', '.join(sorted(names))}")
    return [
        cell
        for cell in grid.cells
        if not only or any(fnmatchcase(f"{cell.method}/{cell.partition}", pattern) for pattern in only)
    ]


def write_results(outcome: Outcome, out: Path) -> None:
    """Write RESULTS. Raises StorageFailed."""
    from fleet.experiments.report import html_report, markdown_report  # matplotlib, a second that errors need not wait

    contents = (
        msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n",
        markdown_report(outcome).encode(),
        html_report(outcome).encode(),
    )
    for name, content in zip(RESULTS, contents, strict=True):
        atomic_write(out / name, content)


def _with_others(grid: Grid, out: Path, ended: list[Ended]) -> list[Ended]:
    """Also the finished cells that this call had nothing to do with."""
    mine = {entry.cell.digest for entry in ended}
    others = [cell for cell in grid.cells if cell.digest not in mine]
    return ended + [Ended(cell, result, None) for cell in others if (result := CellFolder(cell, out).result())]


def _list(grid: Grid, places: list[CellFolder]) -> None:
    for place in places:
        click.echo(f"{place.cell.path}{'  finished' if place.result() else ''}")
    click.echo(
        f"{len(places)} cells of {grid.experiment.rounds} rounds on {grid.experiment.devices} devices, "
        f"{sum(place.result() is None for place in places)} to run"
    )


def _lock(out: Path) -> int:
    """Only one process works in a folder. Raises ConfigError when another does."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another process is at work in {out}") from None
    except OSError as error:
        raise StorageFailed(f"cannot use {out}: {error.strerror}") from error
    return handle
