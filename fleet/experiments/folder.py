"""The folder of a cell: its settings, its progress, and its result.

It holds `cell.json` (settings), `progress.json`, `runs/` (the run) and, when the cell is finished, `result.json`, or
`unusable.json` for values of a search that no device could train with. A folder with another `cell.json` belongs to an
earlier version of the experiment and is deleted when the cell starts.
"""

import shutil
import signal
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from fedvit.files import atomic_write
from fleet.experiments.cells import GridCell
from profiles.report.experiment import CellResult

CELL_FILE = "cell.json"
PROGRESS_FILE = "progress.json"
RESULT_FILE = "result.json"
UNUSABLE_FILE = "unusable.json"
LOG_FILE = "cell.log"


class CellProgress(Struct, frozen=True, kw_only=True):
    """Progress of a cell."""

    round: int = 0  # finished
    accuracy: float | None = None  # mean over devices, newest
    headline: str = ""
    wall_s: float = 0.0  # of all processes of the cell


class UnusableCell(Struct, frozen=True, kw_only=True):
    """The outcome of a cell of a search whose values no device could train with; it is not a failure."""

    digest: str  # of the cell
    reason: str


class FinishedCell(NamedTuple):
    """A cell that has ended, with a result or the reason why it has none."""

    cell: GridCell
    result: CellResult | None
    failure: str | None
    unusable: str | None = None  # of a search: why no device could train with its values


_Ending = TypeVar("_Ending", CellResult, UnusableCell)


class CellFolder:
    """The folder of a cell. Call `begin` before it is run, `result` after."""

    def __init__(self, cell: GridCell, out: Path) -> None:
        self.cell = cell
        self.folder = out / "cells" / cell.path
        share = cell.deal.validation_share
        images = "seed" if share is None else f"validation-{share}-seed"
        dealt = out / "parts" / cell.partition / f"{images}-{cell.seed}"
        self.parts = Path(cell.deal.parts) if cell.deal.parts else dealt

    def result(self) -> CellResult | None:
        """Return the result; None when the cell is not finished, or its settings have changed."""
        return self._read(RESULT_FILE, CellResult)

    def find_ending(self) -> FinishedCell | None:
        """Return the outcome of a cell that need not run again; None if it must run."""
        result, unusable = self.result(), self._read(UNUSABLE_FILE, UnusableCell)
        if result or unusable:
            return FinishedCell(self.cell, result, None, unusable.reason if unusable else None)
        return None

    def _read(self, name: str, kind: type[_Ending]) -> _Ending | None:
        try:
            ending = msgspec.json.decode((self.folder / name).read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return ending if ending.digest == self.cell.digest else None

    def begin(self) -> None:
        """Prepare the folder; files of the same cell stay, so that it can be resumed."""
        file = self.folder / CELL_FILE
        content = msgspec.json.format(msgspec.json.encode(self.cell), indent=2)
        if file.is_file() and file.read_bytes() == content:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        atomic_write(file, content)

    def progress(self) -> CellProgress:
        """Return the newest progress, in which a new cell has no rounds."""
        return read_progress(self.folder)

    def end(self, code: int) -> FinishedCell:
        """Return the outcome of a cell whose process ended with `code`."""
        ending = self.find_ending() if code == 0 else None
        return ending or FinishedCell(self.cell, None, self.failure(code))

    def failure(self, code: int) -> str:
        """Return the reason of an exit code: the last line of the log, or that the process was killed."""
        if code == -signal.SIGKILL:
            return "its process was killed, as the system does when memory runs out; run fewer cells at the same time"
        lines = (self.folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with code {code}"


def read_progress(folder: Path) -> CellProgress:
    """Read a cell's progress; one without a file has no rounds."""
    try:
        return msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=CellProgress)
    except (FileNotFoundError, msgspec.MsgspecError):
        return CellProgress()
