"""Copies of the record beside each run, what was accepted since they were made, and how a copy is put back.

The record is one SQLite database of all runs in a folder. A copy of it is made when a round closes; what devices
brought since lies in files of its own, written before it is acknowledged, so that a copy that is put back loses no
result. Databases at another URL have backups of their own.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.store import COPIES, Store, is_whole
from fedvit.blobs import digest_of
from fedvit.files import WRITING, atomic_write, make_folder, storage_failed, sync_file, sync_folder
from fedvit.wire.messages import Result

log = logging.getLogger(__name__)

KEPT = 2
"""The newest, and one more in case that one is damaged, too."""


class Accepted(Struct, frozen=True):
    """Results that were accepted together, and the round that was open."""

    round: int
    cohort: list[str] | None  # None: no round was open
    needed: int | None
    results: list[tuple[str, Result, int | None]]  # device, result, the round whose server step takes it


class Backups:
    """One run's. With `every` 0 nothing is kept."""

    def __init__(self, store: Store, run: str, folder: Path, every: int) -> None:
        self._store = store
        self._run = run
        self._folder = folder / COPIES
        self._every = every

    def after_round(self, number: int) -> None:
        """A round is closed: copy the record, where it is due. Raises StorageFailed, NoRoom, Damaged."""
        if not self._every or number % self._every:
            return
        make_folder(self._folder)
        for unfinished in self._folder.glob(f"{WRITING}*"):  # by a process that was killed
            unfinished.unlink(missing_ok=True)
        aside = self._folder / f"{WRITING}{secrets.token_hex(8)}"
        try:
            if not self._store.back_up(aside):
                return
            sync_file(aside)
            os.replace(aside, self.file(number))
            sync_folder(self._folder)
            for old in self.rounds()[:-KEPT]:
                self.file(old).unlink(missing_ok=True)
            for file, made in self._files():
                if made < self.since(number):
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot copy the record to {self._folder}", error) from error
        finally:
            for rest in self._folder.glob(f"{aside.name}*"):
                with suppress(OSError):
                    rest.unlink()

    def rounds(self) -> list[int]:
        """Rounds after which the copies here were made, ascending."""
        return sorted(_round_of(file) for file in self._folder.glob("round-*.db"))

    def since(self, number: int) -> int:
        """The round from whose state on everything is to be kept, when round `number` is closed: that of the oldest
        copy, and the beginning while not all copies are made. It is also what damaged states are made anew from."""
        copies = self.rounds()
        if len(copies) >= KEPT:
            return copies[0]
        return 0 if number < KEPT * self._every else number

    def check_record(self) -> None:
        """Raises Damaged where the record lacks a round that a copy of it has: SQLite cannot tell that it lost some."""
        closed = len(self._store.closed_rounds(self._run))
        if any(is_whole(self.file(number)) for number in self.rounds() if number > closed):
            raise self._store.damaged(f"of run {self._run} it has {closed} closed rounds", self._run)

    def file(self, number: int) -> Path:
        """The copy that was made after a round."""
        return self._folder / f"round-{number}.db"

    def note(self, accepted: Accepted) -> None:
        """Keep results apart from the record until every copy has them. Raises StorageFailed, NoRoom."""
        if self._every:
            content = msgspec.msgpack.encode(accepted)
            digest = digest_of(content).partition(":")[2]
            atomic_write(self._folder / f"since-{accepted.round}-{digest}.msgpack", content)

    def put_back(self, say: Callable[[str], None]) -> None:
        """Into the record with what it lacks: it may be a copy that was put back."""
        for file, _ in self._files():
            accepted = _read(file)
            if accepted is None:
                log.error("damaged file", extra={"path": str(file), "held": "results"})
                say(f"run {self._run}: {file} is damaged: it held results; those that the record lacks are asked again")
                file.unlink(missing_ok=True)
                continue
            if accepted.cohort is not None and self._store.round(self._run, accepted.round) is None:
                self._store.open_round(self._run, accepted.round, accepted.cohort, accepted.needed)
            self._store.add_results(accepted.results)

    def _files(self) -> Iterator[tuple[Path, int]]:
        """Those of accepted results, in the order of their rounds."""
        files = [(file, _round_of(file)) for file in self._folder.glob("since-*.msgpack")]
        yield from sorted(files, key=lambda entry: (entry[1], entry[0].name))


def _round_of(file: Path) -> int:
    return int(file.stem.split("-")[1])


def _read(file: Path) -> Accepted | None:
    """None where the file is damaged."""
    try:
        content = file.read_bytes()
        if digest_of(content).partition(":")[2] == file.stem.split("-")[2]:
            return msgspec.msgpack.decode(content, type=Accepted)
    except (OSError, msgspec.MsgspecError):
        pass
    return None
