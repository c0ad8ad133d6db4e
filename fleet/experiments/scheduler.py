"""Runs the unfinished cells of a grid, several at a time, each in its own process."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import NamedTuple, Protocol

import msgspec

from coordinator.config import TrackersConfig
from coordinator.rounds.display import DeviceLine, Display, View
from fedvit.data.layout import PARTITION_FILE
from fedvit.files import atomic_write
from fleet.datasets import read_dataset
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.experiments.cell import LOG_FILE, CellFolder, CellResult
from fleet.experiments.grid import Cell
from fleet.partition import deal
from fleet.processes import Fleet, program

POLL_S = 0.2


class CellJob(Protocol):
    """A running cell, on this machine or on a node."""

    def code(self) -> int | None:
        """Exit code; None while it runs."""

    def stop(self) -> None:
        """End it if it runs; finished rounds stay."""


class CellProcess:
    """A cell in a child process, which ends with this process even by kill -9."""

    def __init__(self, folder: CellFolder, *, at_once: int, keep: bool, metrics: TrackersConfig) -> None:
        self._fleet = Fleet()
        arguments = [str(folder.folder), str(folder.parts), str(at_once), str(int(keep))]
        arguments.append(msgspec.json.encode(metrics).decode())
        log = folder.folder / LOG_FILE
        log.unlink(missing_ok=True)
        self._process = self._fleet.start(folder.cell.path, [*program("fleet.experiments.cell"), *arguments], log)

    def code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._fleet.stop()


class FinishedCell(NamedTuple):
    """A cell that has ended, with a result or the reason why it has none."""

    cell: Cell
    result: CellResult | None
    failure: str | None
    unusable: str | None = None  # of a search: why no device could train with its values


class _RunningCell(NamedTuple):
    folder: CellFolder
    work: CellJob


def run_cells(
    folders: Sequence[CellFolder],
    *,
    jobs: int,
    at_once: int | None = None,
    launch: Callable[[CellFolder], CellJob],
    display: Display,
    line_every_s: float | None,
    ended: Callable[[FinishedCell], Sequence[CellFolder]],
    ahead: Callable[[], list[tuple[str, int]]] = list,
) -> None:
    """Run every cell to its end. `ended` is called with each, first with those that were finished before, and returns
    the cells that can run now. `ahead` gives method and rounds of cells that follow later.

    The images of a search are dealt out before any cell runs, since a device may have too few. At most `jobs` cells are
    launched at a time, and `at_once` of them are expected to compute, by default all. With `line_every_s` the display
    gets a permanent line about running cells at this interval. All processes have ended when this returns or raises,
    and unfinished cells can be resumed.
    """
    pending: list[CellFolder] = []
    at_once = at_once or jobs
    running: list[_RunningCell] = []
    pace, dealer = RoundTimes(), Dealer()

    def add(following: Sequence[CellFolder]) -> int:
        """Add cells, and those that follow from them; the number that is finished already."""
        following, known = list(following), 0
        for folder in following:
            if over := finished(folder):
                known += 1
                if over.result:
                    pace.learn(folder.cell, over.result.wall_s, len(over.result.rounds))
                following += ended(over)
            else:
                pending.append(folder)
        return known

    known, done = add(folders), 0
    if pending and known:
        display.line(f"{known} of {known + len(pending) + len(ahead())} cells are finished already")
    for folder in pending:
        if folder.cell.deal.validation_share is not None:
            dealer.deal(folder)
    reported_at = time.monotonic()
    with ExitStack() as stack:
        while pending or running:
            while pending and len(running) < jobs:
                folder = pending.pop(0)
                dealer.deal(folder)
                folder.begin()
                work = launch(folder)
                stack.callback(work.stop)
                running.append(_RunningCell(folder, work))
                display.line(f"{folder.cell.path}: started")
            for entry in [entry for entry in running if entry.work.code() is not None]:
                running.remove(entry)
                entry.work.stop()
                over = _ended(entry)
                if over.result:
                    pace.learn(over.cell, over.result.wall_s, len(over.result.rounds))
                done += 1
                add(ended(over))
                display.line(_result_line(over, time_left(_left_s(pending, running, ahead(), pace, at_once))))
            view = _view(done, pending, running, ahead(), pace, at_once)
            display.show(view)
            if line_every_s is not None and running and time.monotonic() - reported_at >= line_every_s:
                reported_at = time.monotonic()
                display.line(view.headline)
                for device in view.devices:
                    display.line(f"  {device.name}: {device.state}")
            if running and all(entry.work.code() is None for entry in running):
                time.sleep(POLL_S)


class Dealer:
    """Deals the data set out once per partition and seed; it is read at the first call."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], Samples | Texts] = {}

    def deal(self, folder: CellFolder) -> None:
        """Make the device folders of a cell, unless they exist. Raises FedvitError."""
        wanted = folder.cell.deal
        note = folder.parts.with_name(f"{folder.parts.name}.digest")
        if (folder.parts / PARTITION_FILE).is_file() and note.is_file() and note.read_text() == wanted.digest:
            return
        key = (wanted.dataset, wanted.image_size)
        if key not in self._samples:
            self._samples = {key: read_dataset(*key)}
        note.unlink(missing_ok=True)
        deal(
            self._samples[key],
            wanted.partition,
            wanted.devices,
            folder.parts,
            options=wanted.options,
            seed=wanted.seed,
            test_share=wanted.test_share,
            validation_share=wanted.validation_share,
            global_test=wanted.global_test,
            overwrite=True,
        )
        atomic_write(note, wanted.digest.encode())


class RoundTimes:
    """Seconds per round of each method, as far as they are known, to estimate the remaining time."""

    def __init__(self) -> None:
        self._round_s: dict[str, float] = {}

    def learn(self, cell: Cell, wall_s: float, rounds: int) -> None:
        if rounds:
            self._round_s[cell.method] = wall_s / rounds

    def left_s(self, left: Sequence[tuple[str, int]], jobs: int) -> float | None:
        """Seconds for these rounds, (method, rounds), of `jobs` cells at a time; None before any time is known.

        >>> pace = RoundTimes()
        >>> pace._round_s = {"fedavg": 2.0, "eftvit": 4.0}
        >>> pace.left_s([("fedavg", 10), ("new", 10)], jobs=2)
        25.0
        """
        if not self._round_s:
            return None
        other = fmean(self._round_s.values())
        return sum(self._round_s.get(method, other) * rounds for method, rounds in left) / jobs


def _left_s(
    pending: Sequence[CellFolder],
    running: Sequence[_RunningCell],
    ahead: list[tuple[str, int]],
    pace: RoundTimes,
    jobs: int,
) -> float | None:
    left = [(folder.cell.method, folder.cell.rounds) for folder in pending] + ahead
    for folder, _ in running:
        progress = folder.progress()
        pace.learn(folder.cell, progress.wall_s, progress.round)
        left.append((folder.cell.method, folder.cell.rounds - progress.round))
    return pace.left_s(left, min(jobs, len(left))) if left else None


def _view(
    done: int,
    pending: Sequence[CellFolder],
    running: Sequence[_RunningCell],
    ahead: list[tuple[str, int]],
    pace: RoundTimes,
    jobs: int,
) -> View:
    devices = []
    for folder, _ in running:
        progress, rounds = folder.progress(), folder.cell.rounds
        accuracy = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.3f}"
        state = f"round {progress.round}/{rounds}{accuracy}" if progress.round else progress.headline or "starting"
        devices.append(DeviceLine(folder.cell.path, state, progress.round, rounds))
    left = time_left(_left_s(pending, running, ahead, pace, jobs))
    return View(f"{done} of {done + len(pending) + len(running) + len(ahead)} cells done{left}", devices)


def _result_line(over: FinishedCell, left: str) -> str:
    if over.unusable:
        return f"{over.cell.path}: unusable: {over.unusable}{left}"
    if over.result is None:
        return f"{over.cell.path}: failed: {over.failure}"
    figures = over.result.accuracy
    return (
        f"{over.cell.path}: accuracy {figures.mean:.3f} ± {figures.std_over_devices:.3f} over devices, "
        f"{over.result.wall_s:.0f} s{left}"
    )


def finished(folder: CellFolder) -> FinishedCell | None:
    """The outcome of a cell that need not run again; None where it must run."""
    result, unusable = folder.result(), folder.unusable()
    return FinishedCell(folder.cell, result, None, unusable) if result or unusable else None


def _ended(entry: _RunningCell) -> FinishedCell:
    code = entry.work.code()
    over = finished(entry.folder) if code == 0 else None
    return over or FinishedCell(entry.folder.cell, None, entry.folder.failure(code or 0))


def time_left(seconds: float | None) -> str:
    """The remaining time as text, for the end of a line.

    >>> time_left(None), time_left(40), time_left(300), time_left(9000)
    ('', ', about 40 s left', ', about 5 min left', ', about 2.5 h left')
    """
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {seconds:.0f} s left"
    return f", about {seconds / 60:.0f} min left" if seconds < 5400 else f", about {seconds / 3600:.1f} h left"
