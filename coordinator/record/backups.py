"""Backups of the record in each run's folder: copies, and notes of everything since the last copy.

The record is one SQLite database of all runs in a folder. Results and states are noted in files of the run before they
are written to the record: a restored copy, with its notes, has lost no result and no state. The cost of notes grows
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

from coordinator.record.copies import COPIES, is_whole
from coordinator.record.store import Store
from coordinator.record.tables import SavedState
from fedvit.blobs import digest_of
from fedvit.files import WRITING, atomic_write, make_folder, storage_failed, sync_file, sync_folder
from fedvit.wire.messages import Result

log = logging.getLogger(__name__)

KEPT = 2
"""Copies that are kept: the newest, and one more in case the newest is damaged."""
NOTED_SHARE = 0.25
"""The next copy is made when the notes since the last copy exceed this share of its size. So each noted byte causes at
most four copied bytes, however large the record is, and notes take at most this share of the space of a copy."""
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
    """The backups of one run. With `every` = 0, or with a database that is no file, nothing is kept."""

    def __init__(self, store: Store, run: str, folder: Path, every: int) -> None:
        self._store = store
        self._run = run
        self._folder = folder / COPIES
        self._every = every if store.is_file else 0
        self._repairs = every > 0
        self._file: Path | None = None  # the current file of notes; None until the first note

    # --- copies ---------------------------------------------------------------------------------------

    def after_round(self, number: int, *, last: bool = False) -> None:
        """A round has closed: copy the record if a copy is due. Raises StorageFailed, NoRoom, Damaged."""
        if self._every and number % self._every == 0 and (last or self._is_due()):
            self._copy(number)
        elif self._file and self._file.stat().st_size > FILE_BYTES:
            self._file = self._notes_after(number)

    def _is_due(self) -> bool:
        copies = self.rounds()
        if not copies:
            return True
        size = self.file(copies[-1]).stat().st_size
        noted = sum(file.stat().st_size for file in self._notes() if _round_of(file) >= copies[-1])
        return size < SMALL_BYTES or noted > NOTED_SHARE * size

    def _copy(self, number: int) -> None:
        make_folder(self._folder)
        for unfinished in self._folder.glob(f"{WRITING}*"):  # left by a killed process
            unfinished.unlink(missing_ok=True)
        temporary = self._folder / f"{WRITING}{secrets.token_hex(8)}"
        try:
            self._store.back_up(temporary)
            sync_file(temporary)
            os.replace(temporary, self.file(number))
            sync_folder(self._folder)
            self._file = self._notes_after(number)
            for old in self.rounds()[:-KEPT]:
                self.file(old).unlink(missing_ok=True)
            for file in self._notes():
                if _round_of(file) < self.rounds()[0]:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot copy the record to {self._folder}", error) from error
        finally:
            for rest in self._folder.glob(f"{temporary.name}*"):
                with suppress(OSError):
                    rest.unlink()

    def rounds(self) -> list[int]:
        """Rounds after which the existing copies were made, ascending."""
        return sorted(_round_of(file) for file in self._folder.glob("round-*.db"))

    def since(self, number: int) -> int:
        """The oldest round whose state and uploads must be kept when round `number` has closed: a damaged state is
        recomputed from the previous one. The notes have the older ones."""
        return number - 1 if self._repairs else number

    def check_record(self) -> None:
        """Raises Damaged if the record lacks a round that a copy has: SQLite cannot detect lost transactions."""
        closed = self._closed()
        if any(is_whole(self.file(number)) for number in self.rounds() if number > closed):
            raise self._store.damaged(f"it has {closed} closed rounds of run {self._run}, a copy has more", self._run)

    def _closed(self) -> int:
        newest = self._store.newest_closed(self._run)
        return newest.round if newest else 0

    def file(self, number: int) -> Path:
        """The file of the copy after a round."""
        return self._folder / f"round-{number}.db"

    # --- notes ----------------------------------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Write a note, which is on the disk when this returns, and is kept until every copy has its content. Raises
        StorageFailed, NoRoom."""
        if not self._every:
            return
        if self._file is None:
            self._file = next(iter(self._notes()[-1:]), None) or self._notes_after(self._closed())
        try:
            make_folder(self._folder)
            is_new = not self._file.exists()
            _append(self._file, _line(note))
            if is_new:
                sync_folder(self._folder)
        except OSError as error:
            raise storage_failed(f"cannot write {self._file}", error) from error

    def replay_notes(self, operator_log: Callable[[str], None], strike: Callable[[str, int, str], object]) -> None:
        """Add to the record what it lacks, if it is a restored copy. `strike` records a device's strike."""
        closed, files = self._closed(), self._notes()
        later = [_round_of(file) for file in files[1:]]
        # each file begins after a closed round, so that earlier files are older than that round
        for file in files[sum(number <= closed for number in later) :]:
            lacking: list[Note] = []
            for note in self._read(file, operator_log):
                lacking.append(note)
                if isinstance(note, Closed) and note.round <= closed:
                    lacking.clear()
            for note in lacking:
                self._replay(note, strike)
        if self._every and (now := self._closed()) > closed:
            self._copy(now)

    def _replay(self, note: Note, strike: Callable[[str, int, str], object]) -> None:
        store, run = self._store, self._run
        match note:
            case Accepted():
                if note.cohort is not None and store.round(run, note.round) is None:
                    store.open_round(run, note.round, note.cohort, note.needed)
                store.add_results(note.results)
            case Struck():
                strike(note.device, note.round, note.reason)
            case Closed():
                for number in range(self._closed() + 1, note.round):  # its note was damaged
                    self._close(number, [], None, {})
                self._close(note.round, note.asked, note.state, note.figures)

    def _close(self, number: int, asked: list[str], state: SavedState | None, figures: dict[str, float]) -> None:
        store, run = self._store, self._run
        if store.answered(run, number - 1, "evaluate"):  # a round is evaluated before the next one closes
            store.round_evaluated(run, number - 1)
        if store.round(run, number) is None:
            store.open_round(run, number, [])
        store.close_round(run, number, state, figures, asked)

    def _read(self, file: Path, operator_log: Callable[[str], None]) -> Iterator[Note]:
        """The intact notes of a file; damaged ones are reported, and removed from the file."""
        content = file.read_bytes()
        held = [(line, note) for line in content.split(b"\n") if (note := _note(line)) is not None]
        whole = b"".join(line + b"\n" for line, _ in held)
        if whole != content:
            log.error("damaged file", extra={"path": str(file), "held": "notes"})
            operator_log(
                f"run {self._run}: {file} is damaged: it held results and states; devices are asked again for "
                "results that the record lacks"
            )
            atomic_write(file, whole)
        yield from (note for _, note in held)

    def _notes(self) -> list[Path]:
        """Files of notes, the oldest first."""
        return sorted(self._folder.glob("since-*.notes"), key=_round_of)

    def _notes_after(self, number: int) -> Path:
        """The file of the notes that follow the close of a round."""
        return self._folder / f"since-{number}.notes"


def _round_of(file: Path) -> int:
    return int(file.stem.split("-")[1])


def _line(note: Note) -> bytes:
    """A note preceded by its digest, as one line, so that damage does not affect other notes."""
    content = msgspec.msgpack.encode(note)
    return binascii.b2a_base64(bytes.fromhex(digest_of(content).partition(":")[2]) + content)


def _note(line: bytes) -> Note | None:
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
