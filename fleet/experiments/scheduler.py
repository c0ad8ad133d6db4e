"""Runs the unfinished cells of a grid, several at a time, each in its own process."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import NamedTuple, Protocol

from coordinator.rounds.display import DeviceLine, Display, View
from fedvit.data.layout import PARTITION_FILE
from fedvit.files import atomic_write
from fleet.datasets import read_dataset
from fleet.datasets.columns import Columns
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.experiments.cells import GridCell
from fleet.experiments.folder import CellFolder, FinishedCell
from fleet.experiments.search import Schedule
from fleet.partition import DealSettings, deal

POLL_S = 0.2


class CellJob(Protocol):
    """A running cell, on this machine or on a node."""

    def code(self) -> int | None:
        """Exit code; None while it runs."""

    def stop(self) -> None:
        """End it if it runs; finished rounds stay."""


class CellLauncher(NamedTuple):
    """Starts cells."""

    launch: Callable[[CellFolder], CellJob]
    jobs: int = 1  # most cells that are launched at a time
    at_once: int = 1  # of them, those that can compute at the same time


class _RunningCell(NamedTuple):
    folder: CellFolder
    job: CellJob


def run_cells(
    folders: Sequence[CellFolder],
    schedule: Schedule,
    launcher: CellLauncher,
    display: Display,
    *,
    line_every_s: float | None = None,
) -> None:
    """Run `folders`, the schedule's first cells, and all that follow from them.

    The images of a search are dealt out before any cell runs, since a device may have too few. With `line_every_s` the
    display gets a permanent line about running cells at this interval. All processes have ended when this returns or
    raises, and unfinished cells can be resumed.
    """
    work = _Work(schedule, launcher, display)
    finished = work.add(folders)
    if work.pending and finished:
        total = finished + len(work.pending) + len(schedule.ahead())
        display.line(f"{finished} of {total} cells are finished already")
    for folder in work.pending:
        if folder.cell.deal.validation_share is not None:
            work.dealer.deal(folder)
    reported_at = time.monotonic()
    with ExitStack() as stack:
        while work.pending or work.running:
            while work.pending and len(work.running) < launcher.jobs:
                stack.callback(work.start_next().stop)
            work.collect()
            view = work.view()
            display.show(view)
            if line_every_s is not None and work.running and time.monotonic() - reported_at >= line_every_s:
                reported_at = time.monotonic()
                display.line(view.headline)
                for device in view.devices:
                    display.line(f"  {device.name}: {device.state}")
            if work.running and all(entry.job.code() is None for entry in work.running):
                time.sleep(POLL_S)


class _Work:
    """The cells of one call of `run_cells`."""

    def __init__(self, schedule: Schedule, launcher: CellLauncher, display: Display) -> None:
        self._schedule, self._launcher, self._display = schedule, launcher, display
        self.pending: list[CellFolder] = []
        self.running: list[_RunningCell] = []
        self.dealer = Dealer()
        self._pace = RoundTimes()
        self._done = 0

    def add(self, folders: Sequence[CellFolder]) -> int:
        """Add cells, and those that follow from them; return the number that is finished already."""
        following, finished = list(folders), 0
        for folder in following:
            if over := folder.find_ending():
                finished += 1
                following += self._end(over)
            else:
                self.pending.append(folder)
        return finished

    def start_next(self) -> CellJob:
        """Start the first pending cell."""
        folder = self.pending.pop(0)
        self.dealer.deal(folder)
        folder.begin()
        job = self._launcher.launch(folder)
        self.running.append(_RunningCell(folder, job))
        self._display.line(f"{folder.cell.path}: started")
        return job

    def collect(self) -> None:
        """Take the cells that have ended, and add those that follow."""
        for entry in [entry for entry in self.running if entry.job.code() is not None]:
            self.running.remove(entry)
            entry.job.stop()
            over = entry.folder.end(entry.job.code() or 0)
            self._done += 1
            self.add(self._end(over))
            self._display.line(_result_line(over, time_left(self._estimate_s())))

    def view(self) -> View:
        """Return the state of all cells for a display."""
        devices = []
        for folder, _ in self.running:
            progress, rounds = folder.progress(), folder.cell.rounds
            accuracy = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.3f}"
            state = f"round {progress.round}/{rounds}{accuracy}" if progress.round else progress.headline or "starting"
            devices.append(DeviceLine(folder.cell.path, state, progress.round, rounds))
        total = self._done + len(self.pending) + len(self.running) + len(self._schedule.ahead())
        return View(f"{self._done} of {total} cells done{time_left(self._estimate_s())}", devices)

    def _end(self, over: FinishedCell) -> list[CellFolder]:
        if over.result:
            self._pace.learn(over.cell, over.result.wall_s, len(over.result.rounds))
        return self._schedule.add(over)

    def _estimate_s(self) -> float | None:
        left = [(folder.cell.method, folder.cell.rounds) for folder in self.pending] + self._schedule.ahead()
        for folder, _ in self.running:
            progress = folder.progress()
            self._pace.learn(folder.cell, progress.wall_s, progress.round)
            left.append((folder.cell.method, folder.cell.rounds - progress.round))
        return self._pace.estimate_s(left, min(self._launcher.at_once, len(left))) if left else None


class Dealer:
    """Deals the data set out once per partition and seed; it is read at the first call."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int, Columns], Samples | Texts] = {}

    def deal(self, folder: CellFolder) -> None:
        """Make the device folders of a cell, unless they exist. Raises FedvitError."""
        division = folder.cell.deal
        if division.parts is not None:
            return
        note = folder.parts.with_name(f"{folder.parts.name}.digest")
        if (folder.parts / PARTITION_FILE).is_file() and note.is_file() and note.read_text() == division.digest:
            return
        columns = Columns(**division.columns)
        key = (division.dataset, division.image_size, columns)
        if key not in self._samples:
            self._samples = {key: read_dataset(*key)}
        note.unlink(missing_ok=True)
        settings = DealSettings(
            options=division.options,
            seed=division.seed,
            test_share=division.test_share,
            validation_share=division.validation_share,
            global_test=division.global_test,
            samples=division.samples,
            classes=division.classes,
            overwrite=True,
        )
        deal(self._samples[key], division.partition, division.devices, folder.parts, settings)
        atomic_write(note, division.digest.encode())


class RoundTimes:
    """Seconds per round of each method, as far as they are known, to estimate the remaining time."""

    def __init__(self) -> None:
        self._round_s: dict[str, float] = {}

    def learn(self, cell: GridCell, wall_s: float, rounds: int) -> None:
        """Take the time of a cell's rounds so far."""
        if rounds:
            self._round_s[cell.method] = wall_s / rounds

    def estimate_s(self, left: Sequence[tuple[str, int]], jobs: int) -> float | None:
        """Seconds for these rounds, (method, rounds), of `jobs` cells at a time; None before any time is known.

        >>> pace = RoundTimes()
        >>> pace._round_s = {"fedavg": 2.0, "eftvit": 4.0}
        >>> pace.estimate_s([("fedavg", 10), ("new", 10)], jobs=2)
        25.0
        """
        if not self._round_s:
            return None
        other = fmean(self._round_s.values())
        return sum(self._round_s.get(method, other) * rounds for method, rounds in left) / jobs


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


def time_left(seconds: float | None) -> str:
    """Format the remaining time, for the end of a line.

    >>> time_left(None), time_left(40), time_left(300), time_left(9000)
    ('', ', about 40 s left', ', about 5 min left', ', about 2.5 h left')
    """
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {seconds:.0f} s left"
    return f", about {seconds / 60:.0f} min left" if seconds < 5400 else f", about {seconds / 3600:.1f} h left"
