"""The course of a search, and of an experiment with searches, as it follows from the cells that are finished.

A rung of a search runs all points that are left; those with the highest mean validation accuracy go on to the next,
which has more rounds. Nothing is remembered but results of cells: after `kill -9` they say again what comes next.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fleet.experiments.cell import CellFolder
from fleet.experiments.conduct import Ended, finished
from fleet.experiments.grid import Cell, Grid, Point, Search

Known = Mapping[str, Ended]
"""Cells that are over, by digest."""


class Try(NamedTuple):
    """What came of a point in the last rung that it was in."""

    point: Point
    rounds: int
    accuracy: float | None  # on validation images, mean over devices, then over seeds; None: not known, or unusable
    unusable: str | None  # why


class Standing(NamedTuple):
    """How far a search is."""

    tries: tuple[Try, ...]  # of all points, in their order
    runnable: tuple[Cell, ...]  # of the rung that is under way, or the method's own; finished ones are among them
    ahead: tuple[int, ...]  # rounds of each cell that comes later; what is unusable may make them fewer
    chosen: Point | None  # None: not yet, or no point is usable
    over: bool


def standing(search: Search, known: Known) -> Standing:
    """How far a search is, by the cells that are over. Of equal points the first is chosen."""
    tries = [Try(point, 0, None, None) for point in search.points]
    left = list(range(len(search.points)))  # best first
    own = [cell.rounds for cell in search.points[0].cells]
    for number, rung in enumerate(search.rungs):
        if len(left) < 2:
            break
        left = sorted(left[: rung.points])
        for place in left:
            tries[place] = _try(search.points[place], number, rung.rounds, known)
        cells = [cell for place in left for cell in search.points[place].tries[number]]
        if not all(_is_finished(cell, known) for cell in cells):
            return Standing(tuple(tries), tuple(cells), (*planned_rounds(search, number + 1), *own), None, over=False)
        ranked = {place: accuracy for place in left if (accuracy := tries[place].accuracy) is not None}
        left = sorted(ranked, key=ranked.__getitem__, reverse=True)
    chosen = search.points[left[0]] if left else None
    return Standing(tuple(tries), chosen.cells if chosen else (), (), chosen, over=True)


def planned_rounds(search: Search, first_rung: int = 0) -> list[int]:
    """Rounds of every cell that a search has from a rung on, if all of its points are usable."""
    return [
        rung.rounds
        for number, rung in enumerate(search.rungs)
        if number >= first_rung
        for _ in range(rung.points * len(search.points[0].tries[number]))
    ]


def _try(point: Point, rung: int, rounds: int, known: Known) -> Try:
    over = [known[cell.digest] for cell in point.tries[rung] if _is_finished(cell, known)]
    reasons = [entry.unusable for entry in over if entry.unusable]
    results = [entry.result.accuracy.mean for entry in over if entry.result]
    complete = len(results) == len(point.tries[rung])
    return Try(point, rounds, fmean(results) if complete else None, reasons[0] if reasons else None)


def _is_finished(cell: Cell, known: Known) -> bool:
    entry = known.get(cell.digest)
    return entry is not None and entry.failure is None


class Schedule:
    """Which cells of a grid can run, by those that are over."""

    def __init__(self, grid: Grid, out: Path, over: Iterable[Ended] = ()) -> None:
        self._grid, self._out = grid, out
        self.over = {entry.cell.digest: entry for entry in over}
        self.cells = {digest: entry.cell for digest, entry in self.over.items()}  # that could run so far

    def runnable(self) -> list[CellFolder]:
        """Cells that can run now, each one once; those of searches first."""
        cells = [cell for search in self._grid.searches for cell in standing(search, self.over).runnable]
        new = {cell.digest: cell for cell in (*cells, *self._grid.cells) if cell.digest not in self.cells}
        self.cells |= new
        return [CellFolder(cell, self._out) for cell in new.values()]

    def add(self, entry: Ended) -> list[CellFolder]:
        """Take note of a cell that is over; the cells that can run now."""
        self.over[entry.cell.digest] = entry
        return self.runnable()

    def ahead(self) -> list[tuple[str, int]]:
        """Method and rounds of each cell that will be able to run later."""
        return [
            (search.method, rounds) for search in self._grid.searches for rounds in standing(search, self.over).ahead
        ]

    def total(self) -> int:
        """Cells that could run so far, and those that will follow."""
        return len(self.cells) + len(self.ahead())

    def read(self) -> "Schedule":
        """Take note of what is finished in the folder, as if it had just run; self."""
        places = self.runnable()
        for place in places:
            if entry := finished(place):
                places += self.add(entry)
        return self
