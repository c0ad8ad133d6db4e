"""The outcomes of experiments, as `fleet experiment` writes them: of each file what a comparison shows."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from profiles.report.curves import RoundFigures

MOST_FILES = 200
RESULTS = "results.json"


class CellResult(Struct, frozen=True):
    rounds: list[RoundFigures]
    accuracy_by_device: dict[str, float]
    peak_rss_bytes: int | None = None


class Cell(Struct, frozen=True):
    """One run of the grid."""

    method: str
    partition: str
    result: CellResult | None = None  # None: not finished


class Outcome(Struct, frozen=True):
    """An experiment."""

    experiment: str
    settings: dict[str, Any]  # the file, with defaults
    methods: dict[str, dict[str, Any]]  # name -> method, its options, and tables of a run's configuration
    seeds: list[int]
    cells: list[Cell]


class Experiments:
    """The experiments in a folder: each in a folder of its own, or a single one. A file is read when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, Outcome | None]] = {}

    def outcomes(self) -> dict[str, Outcome]:
        """By the name of their folder; files that cannot be read are left out."""
        files = sorted([self._folder / RESULTS, *self._folder.glob(f"*/{RESULTS}")])[:MOST_FILES]
        found = {file.parent.name: outcome for file in files if (outcome := self._outcome(file))}
        return dict(sorted(found.items()))

    def _outcome(self, file: Path) -> Outcome | None:
        try:
            written = file.stat().st_mtime_ns
            known = self._read.get(file)
            if known is None or known[0] != written:
                self._read[file] = known = (written, _decoded(file.read_bytes()))
        except OSError:
            return None
        return known[1]


def _decoded(content: bytes) -> Outcome | None:
    try:
        return msgspec.json.decode(content, type=Outcome)
    except msgspec.MsgspecError:
        return None
