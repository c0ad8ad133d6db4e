"""Descriptions of the newest tasks of runs, from which a device loads its tensors again. The file is `RUN/TASK`."""

from pathlib import Path

import msgspec

from edge_client.storage.round_files import find_run_folder
from edge_client.storage.sums import add_digest, check_digest, read_file
from fedvit.errors import BadPayload, Damaged
from fedvit.files import atomic_write
from fedvit.wire.messages import Task, TaskKind

_TASK = "TASK"


class TaskNote(msgspec.Struct, frozen=True):
    """A task's seed and digests: enough to load its tensors again, while their blobs are here."""

    run: str
    round: int
    kind: TaskKind
    seed: int
    program: str  # digest
    groups: dict[str, str]  # group -> digest


class TaskNotes:
    """The descriptions in a vault, one for each run. Methods raise BadPayload for an invalid name of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, task: Task) -> None:
        """Store the description of the run's newest task."""
        note = TaskNote(task.run, task.round, task.kind, task.seed, task.program, task.groups)
        write_note(find_run_folder(self._folder, task.run) / _TASK, note)

    def find_newest(self, run: str) -> TaskNote | None:
        """Return the newest task of the run that was started here; None before the first. Raises Damaged."""
        return read_note(find_run_folder(self._folder, run) / _TASK)

    def list_runs(self) -> list[str]:
        """Return the runs that this device has worked for, the newest first."""
        notes = sorted(self._folder.glob(f"*/{_TASK}"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in notes]


def write_note(file: Path, note: TaskNote) -> None:
    """Write the description of a task. Raises StorageFailed."""
    atomic_write(file, add_digest(msgspec.msgpack.encode(note)), private=True)


def read_note(file: Path) -> TaskNote | None:
    """Read the description of a task; None if there is none. Raises Damaged."""
    if not file.exists():
        return None
    try:
        return msgspec.msgpack.decode(check_digest(read_file(file)), type=TaskNote)
    except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Damaged("FV1704", f"{file} is damaged: {error}") from error
