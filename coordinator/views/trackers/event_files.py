"""Event files of TensorBoard. Only `tensorboard.py` imports this module, late: the library is optional."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from coordinator.views.trackers.writer import TaggedRound


class EventFile:
    """A new event file of this process; `newest` is the newest round in earlier files of the folder, 0 without any."""

    def __init__(self, folder: Path, run: str, settings: Mapping[str, Any]) -> None:
        newest = _newest_step(folder)
        self.newest = newest or 0
        folder.mkdir(parents=True, exist_ok=True)
        now_ns = time.time_ns()  # TensorBoard reads files in the order of their names
        self._file = RecordWriter((folder / f"events.out.tfevents.{now_ns:020d}").open("xb"))
        events = [Event(wall_time=now_ns / 1e9, file_version="brain.Event:2")]
        if newest is None:
            events.append(Event(wall_time=now_ns / 1e9, summary=hparams_pb(settings, trial_id=run)))
        self._add(events)

    def write(self, rounds: Sequence[TaggedRound]) -> None:
        self._add(map(_make_event, rounds))

    def close(self) -> None:
        self._file.close()

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            self._file.write(event.SerializeToString())
        self._file.flush()


def _make_event(entry: TaggedRound) -> Event:
    """Make one event per round, so that a round is written completely or not at all."""
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in entry.figures.items()]
    return Event(step=entry.round, wall_time=entry.closed_at.timestamp(), summary=Summary(value=values))


def _newest_step(folder: Path) -> int | None:
    """Find the newest round in a folder's event files; None if there is none."""
    steps = [
        event.step
        for file in sorted(folder.glob("events.out.tfevents.*"))
        for event in EventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]
    return max(steps, default=None)
