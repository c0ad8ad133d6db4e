"""What must survive a power cut on a device: its personal tensors, and the result not yet acknowledged.

Layout: `RUN/round-7-XXXXXXXX/{local.safetensors,result.msgpack,PENDING,SUMS}`; the file `RUN/CURRENT` names the
newest complete round and is replaced atomically. So personal tensors and the result that belongs to them
change together, or not at all. `RUN/TASK` says what the newest task of the run was made of, and `RUN/OVER` that the
run is over for good. A run that is removed is first renamed to `.removed/XXXX`: it is there whole, or not at all.

Where what is sent back is coded, `left.safetensors` holds what coding left out of the round's result, and
`owed.safetensors` what results before it left out: that is what is owed until the result is accepted.

With a key, tensors are encrypted, in files `*.sealed` in place of `*.safetensors`.

`SUMS` holds the digests of a round's files, and the round before the newest stays: where a file is damaged, `mend`
goes back to it. What is damaged is never used; what was personal is kept aside, in `damaged-*`.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_client.integrity import Verified
from edge_client.sums import SUMS, Sums, closed, opened, read_file, read_sums, write_sums
from edge_client.vault_key import VaultKey
from fedvit.blobs import digest_of, digest_of_file, medium_failed
from fedvit.errors import BadPayload, ConfigError, StorageFailed
from fedvit.files import WRITING, atomic_write, make_folder, storage_failed, sync_folder
from fedvit.tensors import Tensors, mapped, pack, packed_pieces, unpack
from fedvit.wire.messages import Result, Task, TaskKind
from fedvit.wire.topics import check_name

_LOCAL, _LEFT, _OWED = "local", "left", "owed"
_PLAIN, _SEALED = ".safetensors", ".sealed"
_RESULT = "result.msgpack"
_CURRENT = "CURRENT"
_PENDING = "PENDING"
_TASK = "TASK"
_REFUSED = "REFUSED"
_OVER = "OVER"
_REMOVED = ".removed"


class TaskNote(msgspec.Struct, frozen=True):
    """What a task was made of: enough to put its tensors together again, while their blobs are here."""

    run: str
    round: int
    kind: TaskKind
    seed: int
    program: str  # digest
    groups: dict[str, str]  # group -> digest


class Owed(NamedTuple):
    """What the server should still get, and the file that holds it; None where it is nothing."""

    file: Path | None
    tensors: Tensors


NOTHING_OWED = Owed(None, {})


class _DamagedFile(StorageFailed):
    """A file of the vault does not hold what was written."""


class Mended(NamedTuple):
    """Something that was found damaged, and what was done about it, in words."""

    what: str
    lost: tuple[str, int] | None = None  # (run, round) of a result that cannot be sent any more


class Vault:
    """One device's vault, all runs. With a key, personal tensors are encrypted from the next commit on.

    Raises StorageFailed when the disk is full, the old content then stands; and when what is here cannot be
    read. Raises ConfigError when it is encrypted and the key is missing or another one, BadPayload for a run that
    cannot be the name of a folder: it comes from the network.
    """

    def __init__(self, folder: Path, key: VaultKey | None = None) -> None:
        self.folder = folder
        self._key = key
        self._verified = Verified()

    def round_of(self, run: str) -> int:
        """The newest round whose work is here; 0 before the first."""
        current = self._current(run)
        return int(current.name.split("-")[1]) if current else 0

    def local(self, run: str) -> Tensors | None:
        """The personal tensors as the newest finished round left them; None before the first."""
        current = self._current(run)
        return None if current is None else self._tensors(current, _LOCAL)

    def owed(self, run: str) -> Owed:
        """What coding left out of this device's results so far, and the server should still get.

        A result that was refused, or of which nobody knows yet, took nothing with it.
        """
        current = self._current(run)
        if current is None:
            return NOTHING_OWED
        taken = not any((current / name).exists() for name in (_PENDING, _REFUSED))
        name = _LEFT if taken else _OWED
        tensors = self._tensors(current, name)
        return NOTHING_OWED if tensors is None else Owed(_there(current, name), tensors)

    def check_key(self) -> None:
        """Raises ConfigError now where personal tensors cannot be opened with the key that is given, or without."""
        for file in sorted(self.folder.glob(f"*/round-*/{_LOCAL}{_SEALED}")):
            if self._key is None or self._is_whole(file):  # what is damaged fits no key
                self._tensors(file.parent, _LOCAL)

    def _newest(self) -> list[Path]:
        homes = sorted(path.parent for path in self.folder.glob(f"*/{_CURRENT}"))
        return [folder for home in homes if (folder := self._current(home.name))]

    def _tensors(self, folder: Path, name: str) -> Tensors | None:
        """Mapped; or in memory where they are encrypted, which cannot be mapped. None where there are none."""
        file = _there(folder, name)
        if file is None:
            return None
        if file.suffix == _SEALED and self._key is None:
            raise ConfigError(f"{file} is encrypted; name the device's key with --vault-key")
        if not self._is_whole(file):
            raise StorageFailed(f"{file} is damaged")
        try:
            if file.suffix == _SEALED and self._key:
                return unpack(self._key.open(read_file(file), _place(file)))
            return mapped(file)
        except OSError as error:
            raise storage_failed(f"cannot read {file}", error) from error
        except BadPayload as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def _is_whole(self, file: Path) -> bool:
        """Whether a file of a round is as it was written; True where nothing tells (an earlier version's)."""
        try:
            sums = read_sums(file.parent)
        except BadPayload:
            return False
        if sums is None:
            return file.is_file()
        return file.name in sums.files and self._verified.is_whole(file, sums.files[file.name])

    def _write(self, folder: Path, name: str, tensors: Tensors) -> dict[str, str]:
        """Returns the file's name and digest."""
        file = folder / f"{name}{_SEALED if self._key else _PLAIN}"
        pieces = [self._key.seal(pack(tensors), _place(file))] if self._key else packed_pieces(tensors)
        atomic_write(file, *pieces, private=True)
        return {file.name: digest_of(*pieces)}

    def commit(self, result: Result, local: Tensors, left: Tensors | None = None, owed: Owed | None = None) -> None:
        """Keep a finished round: personal tensors and result become current in one step. The round before stays.

        `left` is what coding left out of the result, `owed` what was added to it before it was coded.
        """
        home = self._home(result.run)
        folder = home / f"round-{result.round}-{secrets.token_hex(4)}"
        before = _pointed_at(home)
        for old in _generations(home):  # now, so that there are never more than two
            if old != before:
                shutil.rmtree(old, ignore_errors=True)
        try:
            files = self._write(folder, _LOCAL, local)
            content = msgspec.msgpack.encode(result)
            atomic_write(folder / _RESULT, content, private=True)
            files[_RESULT] = digest_of(content)
            if left:
                files |= self._write(folder, _LEFT, left)
            if owed and owed.file:
                if self._key or owed.file.suffix != _PLAIN:  # what is sealed belongs to its place
                    files |= self._write(folder, _OWED, owed.tensors)
                else:
                    files |= _link(owed.file, folder / f"{_OWED}{_PLAIN}")
            atomic_write(folder / _PENDING, b"")
            write_sums(folder, Sums(_generation(before) + 1, files))
            atomic_write(home / _CURRENT, folder.name.encode())
        except StorageFailed:
            # what failed last may be the sync behind the rename: then this folder is the current one
            if _pointed_at(home) != folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self._key:  # what lay open before there was a key does not stay
            for file in [*home.glob(f"round-*/*{_PLAIN}"), *home.glob(f"damaged-*/*{_PLAIN}")]:
                shutil.rmtree(file.parent, ignore_errors=True)
        for unfinished in home.glob(f"{WRITING}*"):  # by a process that was killed; no other one writes here
            with contextlib.suppress(OSError):
                unfinished.unlink()

    # --- damage ---------------------------------------------------------------------------------------

    def mend(self, run: str, *, tensors: bool = True) -> list[Mended]:
        """Let nothing damaged be used: go back to the round before, or begin anew, and say so. To be called by the
        process that owns the vault.

        Without `tensors` only small files are read. Raises StorageFailed when the folder cannot be changed.
        """
        home = self._home(run)
        current = _pointed_at(home)
        damaged = [] if current is None else self._damaged(current, tensors=tensors)
        if current and not damaged:
            return [*self._mend_result(run, current), *(self._mend_left(run, current) if tensors else ())]
        before = [folder for folder in _generations(home) if folder != current]
        if current is None:
            if not before and not (home / _CURRENT).exists():
                return []
            damaged = [home / _CURRENT]
        before.sort(key=lambda folder: (_generation(folder), _round(folder)))
        while before and (also := self._damaged(before[-1])):
            damaged += also
            before.pop()
        return [self._go_back(run, damaged, before[-1] if before else None)]

    def mend_all(self) -> list[Mended]:
        """Small files of all runs: what can be read at each start."""
        runs = sorted({path.parent.name for path in self.folder.glob(f"*/{_CURRENT}")})
        return [mended for run in runs for mended in self.mend(run, tensors=False)]

    def files(self) -> Iterator[tuple[Path, str]]:
        """What lies here, with the digests that it must have."""
        for folder in self.folder.glob("*/round-*"):
            with contextlib.suppress(BadPayload):
                sums = read_sums(folder)
                for name, digest in sums.files.items() if sums else ():
                    yield folder / name, digest

    def _damaged(self, folder: Path, *, tensors: bool = True) -> list[Path]:
        """Files without which a round cannot be resumed from."""
        try:
            sums = read_sums(folder)
        except BadPayload:
            return [folder / SUMS]
        file = _there(folder, _LOCAL)
        if file is None:
            return [folder / f"{_LOCAL}{_PLAIN}"]
        whole = self._looks_whole(file) if sums is None else not tensors or self._is_whole(file)
        return [] if whole else [file]

    def _looks_whole(self, file: Path) -> bool:
        """Of a file that an earlier version wrote: what can be told without a digest."""
        if file.suffix == _SEALED:
            return True  # its key tells
        try:
            mapped(file)
        except BadPayload:
            return False
        except OSError as error:
            if medium_failed(error):
                return False
            raise storage_failed(f"cannot read {file}", error) from error
        return True

    def _go_back(self, run: str, damaged: list[Path], to: Path | None) -> Mended:
        """Make an older round the current one; with none that is whole, the run begins anew."""
        home = self._home(run)
        pending = [folder for folder in {file.parent for file in damaged} if (folder / _PENDING).exists()]
        listed = ", ".join(map(str, damaged))
        try:
            if to:
                atomic_write(home / _CURRENT, to.name.encode())
            for earlier in home.glob("damaged-*"):
                shutil.rmtree(earlier, ignore_errors=True)
            for folder in {file.parent for file in damaged} - {home}:
                if folder.is_dir():
                    folder.rename(home / f"damaged-{folder.name}")
            if not to:
                (home / _CURRENT).unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"{listed} damaged, and cannot be set aside in {home}", error) from error
        if to and damaged == [home / _CURRENT]:
            what = f"{listed} names no round that is here: run {run!r} goes on from {to.name}, the newest that is whole"
        elif to:
            what = f"{listed} damaged: run {run!r} goes back to what round {_round(to)} left"
        else:
            what = (
                f"{listed} damaged or missing: personal tensors of run {run!r} are lost, and begin anew with the "
                f"server's first values; to have them back, stop this device and put {home} back from a backup"
            )
        return Mended(what, (run, _round(pending[0])) if pending else None)

    def _mend_result(self, run: str, current: Path) -> list[Mended]:
        """A damaged result is as one that was refused: personal tensors stay."""
        file, number = current / _RESULT, _round(current)
        if not (current / _PENDING).exists():
            return []
        with contextlib.suppress(_DamagedFile):
            self._result(file)
            return []
        self.settle(run, number, accepted=False)
        return [Mended(f"{file} damaged: the result of round {number} of run {run!r} is lost", (run, number))]

    def _mend_left(self, run: str, current: Path) -> list[Mended]:
        """What coding left out cannot be had back: nothing is owed then."""
        sums = read_sums(current)
        listed = [current / name for name in sums.files if name.startswith((_LEFT, _OWED))] if sums else []
        listed = listed if sums else [file for name in (_LEFT, _OWED) if (file := _there(current, name))]
        damaged = [file for file in listed if not (self._is_whole(file) if sums else self._looks_whole(file))]
        if not damaged:
            return []
        try:
            for file in damaged:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot delete {damaged[0]}, which is damaged", error) from error
        if sums:
            files = {name: digest for name, digest in sums.files.items() if current / name not in damaged}
            write_sums(current, Sums(sums.generation, files))
        names = ", ".join(map(str, damaged))
        return [Mended(f"{names} damaged: what coding left out of earlier results of run {run!r} is not sent")]

    def pending(self) -> list[Result]:
        """Results that no coordinator has acknowledged yet."""
        return [self._result(folder / _RESULT) for folder in self._newest() if (folder / _PENDING).exists()]

    def _result(self, file: Path) -> Result:
        if not self._is_whole(file):
            raise _DamagedFile(f"{file} is damaged")
        try:
            return msgspec.msgpack.decode(read_file(file), type=Result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _DamagedFile(f"{file} is damaged: {error}") from error

    def settle(self, run: str, round_number: int, *, accepted: bool = True) -> None:
        """The result was acknowledged, or refused for good; the personal tensors stay."""
        for folder in _generations(self._home(run)):  # also the one before, to which damage may lead back
            if _round(folder) != round_number or not (folder / _PENDING).exists():
                continue
            if not accepted:
                atomic_write(folder / _REFUSED, b"")  # before PENDING goes: else a power cut would make it accepted
            try:
                (folder / _PENDING).unlink(missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"cannot delete {folder / _PENDING}: {error.strerror}") from error

    def note(self, task: Task) -> None:
        """Remember what the run's newest task is made of."""
        note = TaskNote(task.run, task.round, task.kind, task.seed, task.program, task.groups)
        atomic_write(self._home(task.run) / _TASK, closed(msgspec.msgpack.encode(note)), private=True)

    def noted(self, run: str) -> TaskNote | None:
        """The newest task of the run that was begun here; None before the first."""
        file = self._home(run) / _TASK
        if not file.exists():
            return None
        try:
            return msgspec.msgpack.decode(opened(read_file(file)), type=TaskNote)
        except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def runs(self) -> list[str]:
        """Runs that this device has worked for, the newest first."""
        notes = sorted(self.folder.glob(f"*/{_TASK}"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in notes]

    # --- the end of a run -----------------------------------------------------------------------------

    def end(self, run: str) -> None:
        """The run is over for good, and no coordinator will acknowledge a result of it: one that waits is settled as
        refused. Does nothing where the run left nothing here. Raises StorageFailed."""
        home = self._home(run)
        if not home.is_dir():
            return
        for folder in _generations(home):
            self.settle(run, _round(folder), accepted=False)
        atomic_write(home / _OVER, b"")

    def reopen(self, run: str) -> None:
        """The run goes on after all: a task of it came. Raises StorageFailed."""
        file = self._home(run) / _OVER
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot delete {file}", error) from error

    def is_over(self, run: str) -> bool:
        """Whether this device heard that the run is over for good."""
        return (self._home(run) / _OVER).exists()

    def waits(self, run: str) -> bool:
        """Whether a result of the run was not acknowledged. Raises StorageFailed."""
        return any((folder / _PENDING).exists() for folder in _generations(self._home(run)))

    def path(self, run: str) -> Path:
        """The folder of all that is kept of a run. Raises BadPayload for a name that no run can have."""
        return self._home(run)

    def remove(self, run: str) -> None:
        """Remove all that is kept of a run, in one step: after a kill or a power cut it is here whole, or not at all.

        Raises StorageFailed; what could not be deleted then is in `removed`.
        """
        home, removed = self._home(run), self.folder / _REMOVED
        try:
            if home.is_dir():
                make_folder(removed)
                home.rename(removed / secrets.token_hex(8))
                sync_folder(removed)
                sync_folder(self.folder)  # before anything is deleted: else a cut could bring back half of it
        except OSError as error:
            raise storage_failed(f"cannot remove {home}", error) from error
        self.finish_removals()

    def removed(self) -> list[Path]:
        """What is left of runs whose removal was interrupted."""
        return list((self.folder / _REMOVED).glob("*"))

    def finish_removals(self) -> None:
        """Delete what is left of runs whose removal was interrupted. Raises StorageFailed."""
        for folder in self.removed():
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise storage_failed(f"cannot delete {folder}", error) from error

    def _home(self, run: str) -> Path:
        try:
            return self.folder / check_name(run, "run")
        except ConfigError as error:
            raise BadPayload(str(error)) from None

    def _current(self, run: str) -> Path | None:
        home = self._home(run)
        try:
            folder = home / (home / _CURRENT).read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed(f"cannot read {home / _CURRENT}: {error.strerror}") from error
        if _there(folder, _LOCAL) is None:
            raise StorageFailed(f"the vault names {folder}, which is not there; move {home} away to start anew")
        return folder


def _there(folder: Path, name: str) -> Path | None:
    """The file that holds some tensors of a round, plain or sealed; None where there is none."""
    files = (folder / f"{name}{suffix}" for suffix in (_SEALED, _PLAIN))
    return next((file for file in files if file.is_file()), None)


def _place(file: Path) -> str:
    return f"{file.parent.parent.name}/{file.parent.name}/{file.stem}"


def _generations(home: Path) -> list[Path]:
    """The rounds of a run that lie here. Raises StorageFailed."""
    try:
        return [home / name for name in os.listdir(home) if name.startswith("round-")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed(f"cannot read {home}", error) from error


def _generation(folder: Path | None) -> int:
    """0 before the first, and for one that an earlier version wrote."""
    if folder is not None:
        with contextlib.suppress(BadPayload):
            sums = read_sums(folder)
            return sums.generation if sums else 0
    return 0


def _round(folder: Path) -> int:
    """The round of which a folder holds the work; 0 for one whose name says none."""
    with contextlib.suppress(IndexError, ValueError):
        return int(folder.name.split("-")[1])
    return 0


def _pointed_at(home: Path) -> Path | None:
    """The round that CURRENT names, if it is there. Raises StorageFailed."""
    try:
        folder = home / (home / _CURRENT).read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        if medium_failed(error):
            return None
        raise storage_failed(f"cannot read {home / _CURRENT}", error) from error
    return folder if folder in _generations(home) else None


def _link(file: Path, name: Path) -> dict[str, str]:
    """The same content under another name: without writing it again, where the file system can.

    Returns the name and the digest.
    """
    try:
        os.link(file, name)
        sync_folder(name.parent)
    except OSError:
        atomic_write(name, read_file(file), private=True)
    sums = read_sums(file.parent)
    return {name.name: sums.files[file.name] if sums else digest_of_file(name)}
