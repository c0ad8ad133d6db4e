"""Runs the cells of a grid that are not finished, some at a time, each in a process of its own."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import NamedTuple, Protocol

import msgspec

from coordinator.config import MetricsConfig
from coordinator.run.display import DeviceLine, Display, View
from fedvit.files import atomic_write
from fleet.datasets import read_samples
from fleet.datasets.samples import Samples
from fleet.experiments.cell import LOG_FILE, CellFolder, CellResult
from fleet.experiments.grid import Cell
from fleet.partition import SUMMARY_FILE, deal
from fleet.processes import Fleet, program

POLL_S = 0.2


class Work(Protocol):
    """A cell at work, somewhere."""

    def code(self) -> int | None:
        """Exit code; None while it goes on."""

    def stop(self) -> None:
        """End it, if it goes on; what it finished stays."""


class CellProcess:
    """A cell in a process that ends with this one, however this one ends."""

    def __init__(self, place: CellFolder, *, at_once: int, keep: bool, metrics: MetricsConfig) -> None:
        self._fleet = Fleet()
        arguments = [str(place.folder), str(place.parts), str(at_once), str(int(keep))]
        arguments.append(msgspec.json.encode(metrics).decode())
        log = place.folder / LOG_FILE
        log.unlink(missing_ok=True)
        self._process = self._fleet.start(place.cell.path, [*program("fleet.experiments.cell"), *arguments], log)

    def code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._fleet.stop()


class Ended(NamedTuple):
    """A cell that is over: with a result, or the reason why it has none."""

    cell: Cell
    result: CellResult | None
    failure: str | None
    unusable: str | None = None  # of a search: why no device could train with its values


class _Running(NamedTuple):
    place: CellFolder
    work: Work


def conduct(
    places: Sequence[CellFolder],
    *,
    jobs: int,
    at_once: int | None = None,
    launch: Callable[[CellFolder], Work],
    display: Display,
    line_every_s: float | None,
    ended: Callable[[Ended], Sequence[CellFolder]],
    ahead: Callable[[], list[tuple[str, int]]] = list,
) -> None:
    """Bring every cell to its end; `ended` hears of each, first of those that were finished before, and returns cells
    that can run now. `ahead` gives method and rounds of those that will follow later.

    The images of a search are dealt out before any cell runs, since a device may have too few. At most `jobs` are
    launched and not over; `at_once` of them are expected to be at work, by default all. With `line_every_s` the
    display gets a permanent line about what is running every so often. Whatever ends this function, no process is left
    behind, and cells under way can go on later.
    """
    pending: list[CellFolder] = []
    at_once = at_once or jobs
    running: list[_Running] = []
    pace, dealer = Pace(), Dealer()

    def add(following: Sequence[CellFolder]) -> int:
        """How many of them, and of those that follow from them, are finished already."""
        following, known = list(following), 0
        for place in following:
            if over := finished(place):
                known += 1
                if over.result:
                    pace.learn(place.cell, over.result.wall_s, len(over.result.rounds))
                following += ended(over)
            else:
                pending.append(place)
        return known

    known, done = add(places), 0
    if pending and known:
        display.line(f"{known} of {known + len(pending) + len(ahead())} cells are finished already")
    for place in pending:
        if place.cell.deal.validation_share is not None:
            dealer.deal(place)
    said_at = time.monotonic()
    with ExitStack() as stack:
        while pending or running:
            while pending and len(running) < jobs:
                place = pending.pop(0)
                dealer.deal(place)
                place.begin()
                work = launch(place)
                stack.callback(work.stop)
                running.append(_Running(place, work))
                display.line(f"{place.cell.path}: started")
            for entry in [entry for entry in running if entry.work.code() is not None]:
                running.remove(entry)
                entry.work.stop()
                over = _ended(entry)
                if over.result:
                    pace.learn(over.cell, over.result.wall_s, len(over.result.rounds))
                done += 1
                add(ended(over))
                display.line(_said(over, spoken(_left_s(pending, running, ahead(), pace, at_once))))
            view = _view(done, pending, running, ahead(), pace, at_once)
            display.show(view)
            if line_every_s is not None and running and time.monotonic() - said_at >= line_every_s:
                said_at = time.monotonic()
                display.line(view.headline)
                for device in view.devices:
                    display.line(f"  {device.name}: {device.state}")
            if running and all(entry.work.code() is None for entry in running):
                time.sleep(POLL_S)


class Dealer:
    """Deals the data set out once per partition and seed; it is read when first needed."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], Samples] = {}

    def deal(self, place: CellFolder) -> None:
        """Make the device folders of a cell, unless they are there. Raises FedvitError."""
        wanted = place.cell.deal
        note = place.parts.with_name(f"{place.parts.name}.digest")
        if (place.parts / SUMMARY_FILE).is_file() and note.is_file() and note.read_text() == wanted.digest:
            return
        key = (wanted.dataset, wanted.image_size)
        if key not in self._samples:
            self._samples = {key: read_samples(*key)}
        note.unlink(missing_ok=True)
        deal(
            self._samples[key],
            wanted.partition,
            wanted.devices,
            place.parts,
            options=wanted.options,
            seed=wanted.seed,
            test_share=wanted.test_share,
            validation_share=wanted.validation_share,
            overwrite=True,
        )
        atomic_write(note, wanted.digest.encode())


class Pace:
    """Seconds per round of each method, as far as they are known, to tell how long it will take."""

    def __init__(self) -> None:
        self._round_s: dict[str, float] = {}

    def learn(self, cell: Cell, wall_s: float, rounds: int) -> None:
        if rounds:
            self._round_s[cell.method] = wall_s / rounds

    def left_s(self, left: Sequence[tuple[str, int]], jobs: int) -> float | None:
        """Seconds for so many rounds of these methods, `jobs` at a time; None before anything is known.

        >>> pace = Pace()
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
    running: Sequence[_Running],
    ahead: list[tuple[str, int]],
    pace: Pace,
    jobs: int,
) -> float | None:
    left = [(place.cell.method, place.cell.rounds) for place in pending] + ahead
    for place, _ in running:
        progress = place.progress()
        pace.learn(place.cell, progress.wall_s, progress.round)
        left.append((place.cell.method, place.cell.rounds - progress.round))
    return pace.left_s(left, min(jobs, len(left))) if left else None


def _view(
    done: int,
    pending: Sequence[CellFolder],
    running: Sequence[_Running],
    ahead: list[tuple[str, int]],
    pace: Pace,
    jobs: int,
) -> View:
    devices = []
    for place, _ in running:
        progress, rounds = place.progress(), place.cell.rounds
        accuracy = "" if progress.accuracy is None else f", accuracy {progress.accuracy:.3f}"
        state = f"round {progress.round}/{rounds}{accuracy}" if progress.round else progress.headline or "starting"
        devices.append(DeviceLine(place.cell.path, state, progress.round, rounds))
    left = spoken(_left_s(pending, running, ahead, pace, jobs))
    return View(f"{done} of {done + len(pending) + len(running) + len(ahead)} cells done{left}", devices)


def _said(over: Ended, left: str) -> str:
    if over.unusable:
        return f"{over.cell.path}: unusable: {over.unusable}{left}"
    if over.result is None:
        return f"{over.cell.path}: failed: {over.failure}"
    figures = over.result.accuracy
    return (
        f"{over.cell.path}: accuracy {figures.mean:.3f} ± {figures.std_over_devices:.3f} over devices, "
        f"{over.result.wall_s:.0f} s{left}"
    )


def finished(place: CellFolder) -> Ended | None:
    """What came of a cell that need not run again; None where it must run."""
    result, unusable = place.result(), place.unusable()
    return Ended(place.cell, result, None, unusable) if result or unusable else None


def _ended(entry: _Running) -> Ended:
    code = entry.work.code()
    over = finished(entry.place) if code == 0 else None
    return over or Ended(entry.place.cell, None, entry.place.failure(code or 0))


def spoken(seconds: float | None) -> str:
    """How long it will still take, for the end of a line.

    >>> spoken(None), spoken(40), spoken(300), spoken(9000)
    ('', ', about 40 s left', ', about 5 min left', ', about 2.5 h left')
    """
    if seconds is None:
        return ""
    if seconds < 90:
        return f", about {seconds:.0f} s left"
    return f", about {seconds / 60:.0f} min left" if seconds < 5400 else f", about {seconds / 3600:.1f} h left"
