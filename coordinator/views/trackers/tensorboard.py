"""Event files of TensorBoard, in the run's folder. It needs only the package `tensorboard`."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.record.tables import RunStatus
from coordinator.views.trackers.writer import TaggedRound, Writer

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = "tensorboard"
"""In the run's folder: `tensorboard --logdir runs` finds it."""


class TensorBoardWriter(Writer):
    library = "tensorboard"
    remedy = "Make the folder writable, or free space on its disk"

    _file: "RecordWriter | None" = None

    @property
    def where(self) -> str:
        return f"TensorBoard files in {self._folder}"

    @property
    def _folder(self) -> Path:
        return self._run.folder / FOLDER

    def begin(self) -> int:
        """Start an event file of this process; earlier files show which rounds are written."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        newest = _newest_step(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        now_ns = time.time_ns()  # TensorBoard reads files in the order of their names
        self._file = RecordWriter((self._folder / f"events.out.tfevents.{now_ns:020d}").open("xb"))
        events = [Event(wall_time=now_ns / 1e9, file_version="brain.Event:2")]
        if newest is None:
            settings = hparams_pb(self._run.settings, trial_id=self._run.name)
            events.append(Event(wall_time=now_ns / 1e9, summary=settings))
        self._add(events)
        return newest or 0

    def write(self, rounds: Sequence[TaggedRound]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        def event(entry: TaggedRound) -> "Event":
            # one event per round, so that a round is written completely or not at all
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in entry.figures.items()]
            return Event(step=entry.round, wall_time=entry.closed_at.timestamp(), summary=Summary(value=values))

        self._add(map(event, rounds))

    def end(self, status: RunStatus) -> None:
        assert self._file is not None
        self._file.close()

    def _add(self, events: "Iterable[Event]") -> None:
        assert self._file is not None
        for event in events:
            self._file.write(event.SerializeToString())
        self._file.flush()


def _newest_step(folder: Path) -> int | None:
    """The newest round in a folder's event files; None if there is none."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps = [
        event.step
        for file in sorted(folder.glob("events.out.tfevents.*"))
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]
    return max(steps, default=None)
