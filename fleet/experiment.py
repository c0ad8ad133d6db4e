"""`fleet experiment`: a grid of methods, partitions and seeds from one file, compared on equal terms."""

import fcntl
import os
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from coordinator.run.display import choose_display
from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError, FedvitError, StorageFailed
from fedvit.files import atomic_write
from fleet.experiments.cell import CellFolder
from fleet.experiments.conduct import CellProcess, Ended, conduct
from fleet.experiments.grid import Cell, Grid, read_grid
from fleet.experiments.outcome import Outcome, make_outcome
from profiles.probes.host import usable_cores

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
@click.option("--out", type=click.Path(path_type=Path), help="Folder for everything.  [default: experiments/NAME]")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Cells that run side by side.")
@click.option(
    "--only", multiple=True, metavar="METHOD/PARTITION", help="Only these cells; * stands for any. Repeatable."
)
@click.option("--keep", is_flag=True, help="Keep what devices stored, also of cells that are finished.")
@click.option("--dry-run", is_flag=True, help="Check the file, list the cells, run nothing.")
@json_flag
def experiment_command(
    file: Path, out: Path | None, jobs: int, only: tuple[str, ...], keep: bool, dry_run: bool, as_json: bool
) -> None:
    """Run the grid that FILE describes, over a network in memory; finished cells are not run again."""
    grid = read_grid(file)
    out = out or Path("experiments") / grid.name
    cells = chosen(grid, only)
    places = [CellFolder(cell, out) for cell in cells]
    if dry_run:
        _list(grid, places, as_json)
        return
    lock = _lock(out)
    ended: list[Ended] = []
    at_once = max(1, usable_cores() // jobs)
    try:
        with choose_display(quiet=as_json) as display:
            conduct(
                places,
                jobs=jobs,
                launch=partial(CellProcess, at_once=at_once, keep=keep, metrics=grid.experiment.metrics),
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


def _list(grid: Grid, places: list[CellFolder], as_json: bool) -> None:
    if as_json:
        cells = [
            {"method": place.cell.method, "partition": place.cell.partition, "seed": place.cell.seed,
             "finished": place.result() is not None}
            for place in places
        ]  # fmt: skip
        click.echo(msgspec.json.encode(cells))
        return
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
