"""Backups of the record: copies of it, which all runs of a folder share, and each run's notes since the last copy.

The record is one SQLite database of all runs in a folder. Results and states are noted in files of the run before they
are written to the record: a restored copy, with the notes, has lost no result and no state. The cost of notes grows
with the number of devices, that of a copy with the size of the record; so a copy is made when the notes since the last
copy are no longer small beside it. Databases at another URL need backups of their own.
"""

import binascii
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.copies import (
    COPIES,
    NOTES,
    CopiedRun,
    copies_in,
    find_unneeded,
    is_whole,
    lock_copies,
    notes_in,
    number_in,
    read_runs,
)
from coordinator.record.record import Record
from coordinator.record.rounds import RoundWork
from coordinator.record.tables import SavedState
from fedvit.blobs import digest_of
from fedvit.files import WRITING, atomic_write, make_folder, name_failure, sync_file, sync_folder
from fedvit.wire.messages import Result

log = logging.getLogger(__name__)

NOTED_SHARE = 0.25
"""A run makes the next copy when its notes since the last copy exceed this share of its size. So each noted byte causes
at most four copied bytes, however large the record is."""
SMALL_BYTES = 2**20
"""A smaller copy takes a few milliseconds: it is made whenever `every` allows."""
FILE_BYTES = 2**23
"""Size of a file of notes after which the next round begins a new file."""


class Accepted(Struct, frozen=True, tag=True):
    """Results that were accepted together, and the round that was open."""

    round: int
    cohort: list[str] | None  # None: no round was open, or an earlier note has it
    needed: int | None
    results: list[tuple[str, Result, int | None]]  # device, result, the round whose server step takes it


class Closed(Struct, frozen=True, tag=True):
    """A round whose training has closed, with the server's state and figures."""

    round: int
    asked: list[str]  # devices with a task
    state: SavedState
    figures: dict[str, float]


class Struck(Struct, frozen=True, tag=True):
    """A strike of a device."""

    device: str
    round: int
    reason: str


Note = Accepted | Closed | Struck
_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


class Backups:
    """The backups of one run, whose folder is in that of all runs. With `every` = 0, or with a database that is not a
    file, nothing is kept."""

    def __init__(self, store: Record, run: str, folder: Path, every: int) -> None:
        self._store = store
        self._run = run
        self._home = folder
        self._folder = folder.parent
        self._every = every if store.database.file else 0
        self._repairs = every > 0
        self._file: Path | None = None  # the current file of notes; None until the first note

    # --- copies ---------------------------------------------------------------------------------------

    def after_round(self, number: int, *, last: bool = False) -> None:
        """Copy the record if a copy is due now that a round has closed. Raises StorageFailed, NoRoom, Damaged."""
        if self._every and number % self._every == 0 and (last or self._is_due()):
            self._copy(number)
        elif self._file and self._file.stat().st_size > FILE_BYTES:
            self._file = self._notes_after(number)

    def _is_due(self) -> bool:
        newest = next(reversed(self.copies()), None)
        copied = self._read_copied(newest) if newest else None
        if newest is None or copied is None or not copied.closed:
            return True
        size = newest.stat().st_size
        noted = sum(file.stat().st_size for file in notes_in(self._home) if number_in(file) >= copied.closed)
        return size < SMALL_BYTES or noted > NOTED_SHARE * size

    def _copy(self, number: int) -> None:
        folder = self._folder / COPIES
        with name_failure(f"cannot copy the record to {folder}"), lock_copies(self._folder):
            temporary = folder / f"{WRITING}{secrets.token_hex(8)}"
            try:
                self._store.database.back_up(temporary)
                sync_file(temporary)
                following = max(map(number_in, self.copies()), default=0) + 1
                os.replace(temporary, folder / f"copy-{following}.db")
                sync_folder(folder)
            finally:
                for rest in folder.glob(f"{temporary.name}*"):
                    with suppress(OSError):
                        rest.unlink()
            self._begin_notes(number)
            for file in find_unneeded(self._folder):
                file.unlink(missing_ok=True)

    def copies(self) -> list[Path]:
        """Return the existing copies, the oldest first."""
        return copies_in(self._folder)

    def since(self, number: int) -> int:
        """Return the oldest round whose state and uploads must be kept when round `number` has closed: a damaged state
        is recomputed from the previous one. The notes have the older ones."""
        return number - 1 if self._repairs else number

    def check_record(self) -> None:
        """Raise Damaged if the record lacks a round that a copy has: SQLite cannot detect lost transactions."""
        closed = self._find_closed()
        for copy in self.copies():
            copied = self._read_copied(copy)
            if copied and copied.closed > closed and is_whole(copy):
                raise self._store.database.make_damaged_error(
                    f"it has {closed} closed rounds of run {self._run}, a copy has more", self._run
                )

    def _read_copied(self, copy: Path) -> CopiedRun | None:
        return read_runs(copy).get(self._run)

    def _find_closed(self) -> int:
        newest = self._store.rounds.read_newest_closed(self._run)
        return newest.round if newest else 0

    # --- notes ----------------------------------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Write a note, which is on the disk when this returns, and is kept until every copy has its content. Raises
        StorageFailed, NoRoom."""
        if not self._every:
            return
        if self._file is None:
            self._file = next(reversed(notes_in(self._home)), None) or self._notes_after(self._find_closed())
        with name_failure(f"cannot write {self._file}"):
            make_folder(self._file.parent)
            is_new = not self._file.exists()
            _append(self._file, _encode(note))
            if is_new:
                sync_folder(self._file.parent)

    def replay_notes(self, operator_log: Callable[[str], None], strike: Callable[[str, int, str], object]) -> None:
        """Add to the record what it lacks, if it is a restored copy. `strike` records a device's strike."""
        closed, files = self._find_closed(), notes_in(self._home)
        later = [number_in(file) for file in files[1:]]
        # each file begins after a closed round, so that earlier files are older than that round
        for file in files[sum(number <= closed for number in later) :]:
            lacking: list[Note] = []
            for note in self._read(file, operator_log):
                lacking.append(note)
                if isinstance(note, Closed) and note.round <= closed:
                    lacking.clear()
            for note in lacking:
                self._replay(note, strike)
        if self._every and (now := self._find_closed()) > closed:
            self._copy(now)

    def _replay(self, note: Note, strike: Callable[[str, int, str], object]) -> None:
        store, run = self._store, self._run
        match note:
            case Accepted():
                if note.cohort is not None and store.rounds.read(run, note.round) is None:
                    store.rounds.open(run, note.round, note.cohort, note.needed)
                store.tasks.add_results(note.results)
            case Struck():
                strike(note.device, note.round, note.reason)
            case Closed():
                for number in range(self._find_closed() + 1, note.round):  # its note was damaged
                    self._close(number, [], None, {})
                self._close(note.round, note.asked, note.state, note.figures)

    def _close(self, number: int, asked: list[str], state: SavedState | None, figures: dict[str, float]) -> None:
        store, run = self._store, self._run
        if store.tasks.find_answered(run, number - 1, "evaluate"):  # a round is evaluated before the next one closes
            store.rounds.close_evaluation(run, number - 1)
        if store.rounds.read(run, number) is None:
            store.rounds.open(run, number, [])
        store.rounds.close(run, number, state, figures, RoundWork(asked))

    def _read(self, file: Path, operator_log: Callable[[str], None]) -> Iterator[Note]:
        """The intact notes of a file; damaged ones are reported, and removed from the file."""
        content = file.read_bytes()
        held = [(line, note) for line in content.split(b"\n") if (note := _decode(line)) is not None]
        whole = b"".join(line + b"\n" for line, _ in held)
        if whole != content:
            log.error("damaged file", extra={"path": str(file), "held": "notes"})
            operator_log(
                f"run {self._run}: {file} is damaged: it held results and states; devices are asked again for "
                "results that the record lacks"
            )
            atomic_write(file, whole)
        yield from (note for _, note in held)

    def _begin_notes(self, number: int) -> None:
        """Begin a file of notes after the close of a round, so that the former one is complete. Raises OSError."""
        self._file = self._notes_after(number)
        make_folder(self._file.parent)
        self._file.touch()
        sync_folder(self._file.parent)

    def _notes_after(self, number: int) -> Path:
        """Return the file of the notes that follow the close of a round."""
        return self._home / NOTES / f"since-{number}.notes"


def _encode(note: Note) -> bytes:
    """A note preceded by its digest, as one line, so that damage does not affect other notes."""
    content = msgspec.msgpack.encode(note)
    return binascii.b2a_base64(bytes.fromhex(digest_of(content).partition(":")[2]) + content)


def _decode(line: bytes) -> Note | None:
    """Decode a note; None if it is damaged or incomplete."""
    try:
        held = binascii.a2b_base64(line, strict_mode=True)
        if digest_of(held[32:]).partition(":")[2] == held[:32].hex():
            return _DECODER.decode(held[32:])
    except (ValueError, msgspec.MsgspecError):
        pass
    return None


def _append(file: Path, line: bytes) -> None:
    """Append and sync a line; on an error nothing is added. Raises OSError."""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        end = os.fstat(handle).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(handle, line[written:])
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, end)
            raise
    finally:
        os.close(handle)
