"""The state of a search, and of an experiment with searches, computed from the finished cells.

A rung of a search runs all remaining points; those with the highest mean validation accuracy are run in the next rung
for more rounds. The only state is the results of cells, so that a search resumes after `kill -9`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fleet.experiments.cells import Grid, GridCell, Search, SearchPoint
from fleet.experiments.folder import CellFolder, FinishedCell

Ended = Mapping[str, FinishedCell]
"""Cells that have ended, by digest."""


class Try(NamedTuple):
    """The outcome of a point in its last rung."""

    point: SearchPoint
    rounds: int
    accuracy: float | None  # on validation images, mean over devices, then over seeds; None: not known, or unusable
    unusable: str | None  # why


class SearchState(NamedTuple):
    """The state of a search."""

    tries: tuple[Try, ...]  # of all points, in their order
    runnable: tuple[GridCell, ...]  # of the rung that is under way, or the method's own; finished ones are among them
    ahead: tuple[int, ...]  # rounds of each cell that comes later; unusable points may make them fewer
    chosen: SearchPoint | None  # None: not yet, or no point is usable
    over: bool


def search_state(search: Search, ended: Ended) -> SearchState:
    """Return the state of a search, by the cells that have ended. Of equal points the first is chosen."""
    tries = [Try(point, 0, None, None) for point in search.points]
    left = list(range(len(search.points)))  # best first
    own = [cell.rounds for cell in search.points[0].cells]
    for number, rung in enumerate(search.rungs):
        if len(left) < 2:
            break
        left = sorted(left[: rung.points])
        for index in left:
            tries[index] = _try(search.points[index], number, rung.rounds, ended)
        cells = [cell for index in left for cell in search.points[index].tries[number]]
        if not all(_is_finished(cell, ended) for cell in cells):
            return SearchState(tuple(tries), tuple(cells), (*list_rounds(search, number + 1), *own), None, over=False)
        ranked = {index: accuracy for index in left if (accuracy := tries[index].accuracy) is not None}
        left = sorted(ranked, key=ranked.__getitem__, reverse=True)
    chosen = search.points[left[0]] if left else None
    return SearchState(tuple(tries), chosen.cells if chosen else (), (), chosen, over=True)


def list_rounds(search: Search, first_rung: int = 0) -> list[int]:
    """Rounds of every cell that a search has from a rung on, if all of its points are usable."""
    return [
        rung.rounds
        for number, rung in enumerate(search.rungs)
        if number >= first_rung
        for _ in range(rung.points * len(search.points[0].tries[number]))
    ]


def _try(point: SearchPoint, rung: int, rounds: int, ended: Ended) -> Try:
    over = [ended[cell.digest] for cell in point.tries[rung] if _is_finished(cell, ended)]
    reasons = [entry.unusable for entry in over if entry.unusable]
    results = [entry.result.accuracy.mean for entry in over if entry.result]
    complete = len(results) == len(point.tries[rung])
    return Try(point, rounds, fmean(results) if complete else None, reasons[0] if reasons else None)


def _is_finished(cell: GridCell, ended: Ended) -> bool:
    entry = ended.get(cell.digest)
    return entry is not None and entry.failure is None


class Schedule:
    """The cells of a grid that can run, by those that have ended."""

    def __init__(self, grid: Grid, out: Path, over: Iterable[FinishedCell] = ()) -> None:
        self._grid, self._out = grid, out
        self.over = {entry.cell.digest: entry for entry in over}
        self.cells = {digest: entry.cell for digest, entry in self.over.items()}  # that could run so far

    def take_runnable(self) -> list[CellFolder]:
        """Return the cells that can run now, each one once; those of searches first."""
        cells = [cell for search in self._grid.searches for cell in search_state(search, self.over).runnable]
        new = {cell.digest: cell for cell in (*cells, *self._grid.cells) if cell.digest not in self.cells}
        self.cells |= new
        return [CellFolder(cell, self._out) for cell in new.values()]

    def add(self, entry: FinishedCell) -> list[CellFolder]:
        """Add a cell that has ended, and return the cells that can run now."""
        self.over[entry.cell.digest] = entry
        return self.take_runnable()

    def ahead(self) -> list[tuple[str, int]]:
        """Method and rounds of each cell that will be able to run later."""
        return [
            (search.method, rounds)
            for search in self._grid.searches
            for rounds in search_state(search, self.over).ahead
        ]

    def total(self) -> int:
        """Cells that could run so far, and those that will follow."""
        return len(self.cells) + len(self.ahead())

    def read(self) -> "Schedule":
        """Add all cells that are finished in the folder; return the schedule itself."""
        folders = self.take_runnable()
        for folder in folders:
            if entry := folder.find_ending():
                folders += self.add(entry)
        return self
