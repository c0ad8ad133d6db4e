"""Event files of TensorBoard, in the run's folder. It needs only the package `tensorboard`."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.record.tables import RunStatus
from coordinator.views.trackers.writer import TaggedRound, Writer

if TYPE_CHECKING:
    from coordinator.views.trackers.event_files import EventFile

FOLDER = "tensorboard"
"""In the run's folder: `tensorboard --logdir runs` finds it."""


class TensorBoardWriter(Writer):
    library = "tensorboard"
    remedy = "Make the folder writable, or free space on its disk"

    _file: "EventFile | None" = None

    @property
    def where(self) -> str:
        return f"TensorBoard files in {self._folder}"

    @property
    def _folder(self) -> Path:
        return self._run.folder / FOLDER

    def begin(self) -> int:
        """Start an event file of this process; earlier files show which rounds are written."""
        event_files = import_module("coordinator.views.trackers.event_files")
        file: EventFile = event_files.EventFile(self._folder, self._run.name, self._run.settings)
        self._file = file
        return file.newest

    def write(self, rounds: Sequence[TaggedRound]) -> None:
        assert self._file is not None
        self._file.write(rounds)

    def end(self, status: RunStatus) -> None:
        assert self._file is not None
        self._file.close()
