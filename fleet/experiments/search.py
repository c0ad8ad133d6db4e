"""The state of a search, and of an experiment with searches, computed from the finished cells.

A rung of a search runs all remaining points; those with the highest mean validation accuracy are run in the next rung
for more rounds. The only state is the results of cells, so that a search resumes after `kill -9`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fleet.experiments.cells import Grid, GridCell, Search, SearchPoint
from fleet.experiments.folder import CellFolder, FinishedCell
from profiles.report.experiment import Values

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
    if not left:
        return SearchState(tuple(tries), (), (), None, over=True)
    best = tries[left[0]]
    while point := _find_point_beyond(search, best.point.values, [one.point.values for one in tries]):
        last = len(search.rungs) - 1
        tries.append(_try(point, last, search.rungs[last].rounds, ended))
        if not all(_is_finished(cell, ended) for cell in point.tries[last]):
            return SearchState(tuple(tries), point.tries[last], tuple(own), None, over=False)
        if (tries[-1].accuracy or 0.0) > (best.accuracy or 0.0):
            best = tries[-1]
    return SearchState(tuple(tries), best.point.cells, (), best.point, over=True)


def _find_point_beyond(search: Search, best: Values, tried: Sequence[Values]) -> SearchPoint | None:
    """Find values to try where the best one of an option is the lowest or highest of all: the next one beyond it, by
    the ratio of the outermost two in the file. None if there is none, or `search.beyond` of them were tried."""
    for option, value in best.items():
        given = [point.values[option] for point in search.points]
        if not all(map(_is_positive, given)) or len(set(given)) < 2:
            continue
        ordered, whole = sorted(set(given)), all(isinstance(one, int) for one in given)
        for edge, neighbour in ((ordered[0], ordered[1]), (ordered[-1], ordered[-2])):
            further = {
                one[option] for one in tried if (one[option] > edge) == (edge > neighbour) and one[option] != edge
            }
            outermost = max({edge, *further}) if edge > neighbour else min({edge, *further})
            if value != outermost or len(further) >= search.beyond:
                continue
            next_value = value * edge / neighbour
            wanted = {**best, option: round(next_value) if whole else float(f"{next_value:.4g}")}
            if wanted not in tried and (point := search.make_point(wanted)):
                return point
    return None


def _is_positive(value: Any) -> bool:
    """Return whether an option's value is a number above zero."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


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
        self._ahead: list[tuple[str, int]] | None = None  # None: not computed since a cell has ended

    def take_runnable(self) -> list[CellFolder]:
        """Return the cells that can run now, each one once; those of searches first."""
        cells = [cell for search in self._grid.searches for cell in search_state(search, self.over).runnable]
        new = {cell.digest: cell for cell in (*cells, *self._grid.cells) if cell.digest not in self.cells}
        self.cells |= new
        return [CellFolder(cell, self._out) for cell in new.values()]

    def add(self, entry: FinishedCell) -> list[CellFolder]:
        """Add a cell that has ended, and return the cells that can run now."""
        self.over[entry.cell.digest] = entry
        self._ahead = None
        return self.take_runnable()

    def ahead(self) -> list[tuple[str, int]]:
        """Method and rounds of each cell that will be able to run later."""
        if self._ahead is None:  # a display asks several times a second
            self._ahead = [
                (search.method, rounds)
                for search in self._grid.searches
                for rounds in search_state(search, self.over).ahead
            ]
        return self._ahead

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
