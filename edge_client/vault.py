"""The storage of a device that survives power cuts: personal tensors, and the unacknowledged result.

Layout: `RUN/round-7-XXXXXXXX/{local.safetensors,result.msgpack,PENDING,SUMS}`; the file `RUN/CURRENT` names the
newest complete round and is replaced atomically. So personal tensors and the result that belongs to them
change together, or not at all. `RUN/TASK` describes the newest task of the run, and `RUN/OVER` marks a run that will
not be resumed. A run is removed by renaming it to `.removed/XXXX` first: it is there completely, or not at all.

If uploads are coded, `left.safetensors` holds the residual after the round's result (error feedback), and
`owed.safetensors` the residual before it, which is valid until the result is accepted.

With a key, tensors are encrypted, in files `*.sealed` in place of `*.safetensors`.

`SUMS` holds the digests of a round's files, and the round before the newest is kept: if a file is damaged, `repair`
returns to it. Damaged files are never used; personal ones are moved to `damaged-*`.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_client.sums import SUMS, Sums, closed, opened, read_file, read_sums, write_sums
from edge_client.vault_key import VaultKey
from fedvit.blobs import Verified, digest_of, digest_of_file, medium_failed
from fedvit.errors import BadPayload, ConfigError, Damaged, StorageFailed
from fedvit.files import WRITING, atomic_write, folder_bytes, make_folder, storage_failed, sync_folder
from fedvit.tensors import Tensors, map_tensors, pack, pack_in_pieces, unpack
from fedvit.wire.messages import Result, Task, TaskKind
from fedvit.wire.topics import check_name

_LOCAL, _NEW_RESIDUAL, _RESIDUAL = "local", "left", "owed"
_PLAIN, _SEALED = ".safetensors", ".sealed"
_RESULT = "result.msgpack"
_CURRENT = "CURRENT"
_PENDING = "PENDING"
_TASK = "TASK"
_REFUSED = "REFUSED"
_OVER = "OVER"
_REMOVED = ".removed"


class TaskNote(msgspec.Struct, frozen=True):
    """A task's seed and digests: enough to load its tensors again, while their blobs are here."""

    run: str
    round: int
    kind: TaskKind
    seed: int
    program: str  # digest
    groups: dict[str, str]  # group -> digest


class Residual(NamedTuple):
    """What coding left out of results, and the file that holds it; None if there is nothing."""

    file: Path | None
    tensors: Tensors


NO_RESIDUAL = Residual(None, {})


class Repair(NamedTuple):
    """Damage that was found, and how it was repaired."""

    message: str
    lost: tuple[str, int] | None = None  # (run, round) of a result that cannot be sent any more


class Vault:
    """One device's vault, all runs. With a key, personal tensors are encrypted from the next commit on.

    Raises StorageFailed when the disk is full, which leaves the old content, and when a file cannot be read. Raises
    ConfigError when it is encrypted and the key is missing or wrong, BadPayload for a run that cannot be the name of a
    folder: it comes from the network.
    """

    def __init__(self, folder: Path, key: VaultKey | None = None) -> None:
        self.folder = folder
        self._key = key
        self._verified = Verified()

    def round_of(self, run: str) -> int:
        """The newest stored round; 0 before the first."""
        current = self._current(run)
        return int(current.name.split("-")[1]) if current else 0

    def local(self, run: str) -> Tensors | None:
        """The personal tensors as the newest finished round left them; None before the first."""
        current = self._current(run)
        return None if current is None else self._tensors(current, _LOCAL)

    def residual(self, run: str) -> Residual:
        """What coding left out of this device's accepted results (error feedback).

        A result that was refused, or not acknowledged yet, does not change the residual.
        """
        current = self._current(run)
        if current is None:
            return NO_RESIDUAL
        accepted = not any((current / name).exists() for name in (_PENDING, _REFUSED))
        name = _NEW_RESIDUAL if accepted else _RESIDUAL
        tensors = self._tensors(current, name)
        return NO_RESIDUAL if tensors is None else Residual(_existing(current, name), tensors)

    def check_key(self) -> None:
        """Raises ConfigError if personal tensors cannot be decrypted with the given key, or without one."""
        for file in sorted(self.folder.glob(f"*/round-*/{_LOCAL}{_SEALED}")):
            if self._key is None or self._is_whole(file):  # a damaged file fails with any key
                self._tensors(file.parent, _LOCAL)

    def _newest(self) -> list[Path]:
        homes = sorted(path.parent for path in self.folder.glob(f"*/{_CURRENT}"))
        return [folder for home in homes if (folder := self._current(home.name))]

    def _tensors(self, folder: Path, name: str) -> Tensors | None:
        """Mapped tensors, or tensors in memory if they are encrypted. None if there are none."""
        file = _existing(folder, name)
        if file is None:
            return None
        if file.suffix == _SEALED and self._key is None:
            raise ConfigError(f"{file} is encrypted; name the device's key with --vault-key")
        if not self._is_whole(file):
            raise Damaged(f"{file} is damaged")
        try:
            if file.suffix == _SEALED and self._key:
                return unpack(self._key.open(read_file(file), _path_in_vault(file)))
            return map_tensors(file)
        except OSError as error:
            raise storage_failed(f"cannot read {file}", error) from error
        except BadPayload as error:
            raise Damaged(f"{file} is damaged: {error}") from error

    def _is_whole(self, file: Path) -> bool:
        """Whether a file of a round is undamaged; True if it has no checksum (of an earlier version)."""
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
        pieces = [self._key.seal(pack(tensors), _path_in_vault(file))] if self._key else pack_in_pieces(tensors)
        atomic_write(file, *pieces, private=True)
        return {file.name: digest_of(*pieces)}

    def commit(
        self, result: Result, local: Tensors, new_residual: Tensors | None = None, residual: Residual | None = None
    ) -> None:
        """Store a finished round: personal tensors and result become current in one step. The round before is kept.

        `residual` is that of earlier results, `new_residual` the one after this result.
        """
        home = self._home(result.run)
        folder = home / f"round-{result.round}-{secrets.token_hex(4)}"
        before = _current_folder(home)
        for old in _generations(home):  # now, so that there are never more than two
            if old != before:
                shutil.rmtree(old, ignore_errors=True)
        try:
            files = self._write(folder, _LOCAL, local)
            content = msgspec.msgpack.encode(result)
            atomic_write(folder / _RESULT, content, private=True)
            files[_RESULT] = digest_of(content)
            if new_residual:
                files |= self._write(folder, _NEW_RESIDUAL, new_residual)
            if residual and residual.file:
                if self._key or residual.file.suffix != _PLAIN:  # encryption binds a file to its path
                    files |= self._write(folder, _RESIDUAL, residual.tensors)
                else:
                    files |= _link(residual.file, folder / f"{_RESIDUAL}{_PLAIN}")
            atomic_write(folder / _PENDING, b"")
            write_sums(folder, Sums(_generation(before) + 1, files))
            atomic_write(home / _CURRENT, folder.name.encode())
        except StorageFailed:
            # if only the sync after the rename failed, this folder is the current one
            if _current_folder(home) != folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self._key:  # unencrypted files from before the key are removed
            for file in [*home.glob(f"round-*/*{_PLAIN}"), *home.glob(f"damaged-*/*{_PLAIN}")]:
                shutil.rmtree(file.parent, ignore_errors=True)
        for unfinished in home.glob(f"{WRITING}*"):  # by a process that was killed; no other one writes here
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def count_replaced_bytes(self, run: str) -> int:
        """Return how many bytes the run's next commit removes before it writes."""
        home = self._home(run)
        before = _current_folder(home)
        return sum(folder_bytes(old) for old in _generations(home) if old != before)

    # --- damage ---------------------------------------------------------------------------------------

    def repair(self, run: str, *, tensors: bool = True) -> list[Repair]:
        """Return from damaged files to the round before, or to an empty run; returns the repairs. To be called by the
        process that owns the vault.

        Without `tensors` only small files are read. Raises StorageFailed when the folder cannot be changed.
        """
        home = self._home(run)
        current = _current_folder(home)
        damaged = [] if current is None else self._damaged(current, tensors=tensors)
        if current and not damaged:
            return [*self._repair_result(run, current), *(self._repair_residual(run, current) if tensors else ())]
        before = [folder for folder in _generations(home) if folder != current]
        if current is None:
            if not (home / _CURRENT).exists():
                before = [folder for folder in before if not _is_unfinished(folder)]
                if not before:
                    return []
            damaged = [home / _CURRENT]
        before.sort(key=lambda folder: (_generation(folder), _round(folder)))
        while before and (also := self._damaged(before[-1])):
            damaged += also
            before.pop()
        return [self._return_to(run, damaged, before[-1] if before else None)]

    def repair_all(self) -> list[Repair]:
        """Check and repair the small files of all runs, which is fast enough for each start."""
        runs = sorted({path.parent.name for path in self.folder.glob(f"*/{_CURRENT}")})
        return [repair for run in runs for repair in self.repair(run, tensors=False)]

    def files(self) -> Iterator[tuple[Path, str]]:
        """All files with checksums, and their expected digests."""
        for folder in self.folder.glob("*/round-*"):
            with contextlib.suppress(BadPayload):
                sums = read_sums(folder)
                for name, digest in sums.files.items() if sums else ():
                    yield folder / name, digest

    def _damaged(self, folder: Path, *, tensors: bool = True) -> list[Path]:
        """Damaged files without which a round cannot be used."""
        try:
            sums = read_sums(folder)
        except BadPayload:
            return [folder / SUMS]
        file = _existing(folder, _LOCAL)
        if file is None:
            return [folder / f"{_LOCAL}{_PLAIN}"]
        whole = self._looks_whole(file) if sums is None else not tensors or self._is_whole(file)
        return [] if whole else [file]

    def _looks_whole(self, file: Path) -> bool:
        """Whether a file without a checksum (of an earlier version) seems undamaged."""
        if file.suffix == _SEALED:
            return True  # decryption shows
        try:
            map_tensors(file)
        except BadPayload:
            return False
        except OSError as error:
            if medium_failed(error):
                return False
            raise storage_failed(f"cannot read {file}", error) from error
        return True

    def _return_to(self, run: str, damaged: list[Path], to: Path | None) -> Repair:
        """Make an older round the current one; without an undamaged one the run starts with empty storage."""
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
            raise storage_failed(f"{listed} damaged, and cannot be moved within {home}", error) from error
        if to and damaged == [home / _CURRENT]:
            message = f"{listed} names no stored round: run {run!r} continues from {to.name}, the newest undamaged one"
        elif to:
            message = f"{listed} damaged: run {run!r} returns to the tensors of round {_round(to)}"
        else:
            message = (
                f"{listed} damaged or missing: personal tensors of run {run!r} are lost, and start from the "
                f"server's initial values; to restore them, stop this device and restore {home} from a backup"
            )
        return Repair(message, (run, _round(pending[0])) if pending else None)

    def _repair_result(self, run: str, current: Path) -> list[Repair]:
        """A damaged result counts as refused: personal tensors are kept."""
        file, number = current / _RESULT, _round(current)
        if not (current / _PENDING).exists():
            return []
        with contextlib.suppress(Damaged):
            self._result(file)
            return []
        self.settle(run, number, accepted=False)
        return [Repair(f"{file} damaged: the result of round {number} of run {run!r} is lost", (run, number))]

    def _repair_residual(self, run: str, current: Path) -> list[Repair]:
        """A damaged residual is lost: the next result starts without one."""
        sums = read_sums(current)
        listed = [current / name for name in sums.files if name.startswith((_NEW_RESIDUAL, _RESIDUAL))] if sums else []
        listed = listed if sums else [file for name in (_NEW_RESIDUAL, _RESIDUAL) if (file := _existing(current, name))]
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
        return [Repair(f"{names} damaged: the residual of earlier results of run {run!r} (error feedback) is lost")]

    def pending(self) -> list[Result]:
        """Results that no coordinator has acknowledged yet."""
        return [self._result(folder / _RESULT) for folder in self._newest() if (folder / _PENDING).exists()]

    def _result(self, file: Path) -> Result:
        if not self._is_whole(file):
            raise Damaged(f"{file} is damaged")
        try:
            return msgspec.msgpack.decode(read_file(file), type=Result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(f"{file} is damaged: {error}") from error

    def settle(self, run: str, round_number: int, *, accepted: bool = True) -> None:
        """Mark the result as acknowledged, or as refused for good; the personal tensors are kept."""
        for folder in _generations(self._home(run)):  # also the round before, to which a repair may return
            if _round(folder) != round_number or not (folder / _PENDING).exists():
                continue
            if not accepted:
                atomic_write(
                    folder / _REFUSED, b""
                )  # before PENDING is removed: else a power cut would make the result accepted
            try:
                (folder / _PENDING).unlink(missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"cannot delete {folder / _PENDING}: {error.strerror}") from error

    def note(self, task: Task) -> None:
        """Store the description of the run's newest task."""
        note = TaskNote(task.run, task.round, task.kind, task.seed, task.program, task.groups)
        atomic_write(self._home(task.run) / _TASK, closed(msgspec.msgpack.encode(note)), private=True)

    def noted(self, run: str) -> TaskNote | None:
        """The newest task of the run that was started here; None before the first."""
        file = self._home(run) / _TASK
        if not file.exists():
            return None
        try:
            return msgspec.msgpack.decode(opened(read_file(file)), type=TaskNote)
        except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged(f"{file} is damaged: {error}") from error

    def runs(self) -> list[str]:
        """Runs that this device has worked for, the newest first."""
        notes = sorted(self.folder.glob(f"*/{_TASK}"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in notes]

    # --- the end of a run -----------------------------------------------------------------------------

    def end(self, run: str) -> None:
        """Mark the run as over for good: an unacknowledged result counts as refused. Does nothing for an unknown run.
        Raises StorageFailed."""
        home = self._home(run)
        if not home.is_dir():
            return
        for folder in _generations(home):
            self.settle(run, _round(folder), accepted=False)
        atomic_write(home / _OVER, b"")

    def reopen(self, run: str) -> None:
        """Remove the mark of `end`: a task of the run arrived. Raises StorageFailed."""
        file = self._home(run) / _OVER
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise storage_failed(f"cannot delete {file}", error) from error

    def is_over(self, run: str) -> bool:
        """Whether this device was informed that the run is over for good."""
        return (self._home(run) / _OVER).exists()

    def has_pending(self, run: str) -> bool:
        """Whether a result of the run is not acknowledged yet. Raises StorageFailed."""
        return any((folder / _PENDING).exists() for folder in _generations(self._home(run)))

    def path(self, run: str) -> Path:
        """The folder of a run. Raises BadPayload for an invalid name."""
        return self._home(run)

    def remove(self, run: str) -> None:
        """Remove a run in one step: after a kill or a power cut it is here completely, or not at all.

        Raises StorageFailed; files that could not be deleted are then listed by `removed`.
        """
        home, removed = self._home(run), self.folder / _REMOVED
        try:
            if home.is_dir():
                make_folder(removed)
                home.rename(removed / secrets.token_hex(8))
                sync_folder(removed)
                sync_folder(self.folder)  # before anything is deleted: else a power cut could restore half of it
        except OSError as error:
            raise storage_failed(f"cannot remove {home}", error) from error
        self.finish_removals()

    def removed(self) -> list[Path]:
        """Remains of runs whose removal was interrupted."""
        return list((self.folder / _REMOVED).glob("*"))

    def finish_removals(self) -> None:
        """Delete the remains of runs whose removal was interrupted. Raises StorageFailed."""
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
        if _existing(folder, _LOCAL) is None:
            raise StorageFailed(f"the vault names {folder}, which does not exist; move {home} away to start again")
        return folder


def _existing(folder: Path, name: str) -> Path | None:
    """The file with some tensors of a round, plain or encrypted; None if there is none."""
    files = (folder / f"{name}{suffix}" for suffix in (_SEALED, _PLAIN))
    return next((file for file in files if file.is_file()), None)


def _path_in_vault(file: Path) -> str:
    return f"{file.parent.parent.name}/{file.parent.name}/{file.stem}"


def _generations(home: Path) -> list[Path]:
    """The stored rounds of a run. Raises StorageFailed."""
    try:
        return [home / name for name in os.listdir(home) if name.startswith("round-")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed(f"cannot read {home}", error) from error


def _generation(folder: Path | None) -> int:
    """The count of rounds before this one; 0 for the first, and for one of an earlier version."""
    if folder is not None:
        with contextlib.suppress(BadPayload):
            sums = read_sums(folder)
            return sums.generation if sums else 0
    return 0


def _round(folder: Path) -> int:
    """The round number of a folder; 0 if its name has none."""
    with contextlib.suppress(IndexError, ValueError):
        return int(folder.name.split("-")[1])
    return 0


def _is_unfinished(folder: Path) -> bool:
    """Whether this is a run's first round, and the process ended before `CURRENT` named it.

    If `CURRENT` did name it, and was lost, no acknowledgement of the round has arrived: then it is trained again, from
    the values it began with, to the same result.
    """
    try:
        sums = read_sums(folder)
    except BadPayload:
        return False
    return sums is None or (sums.generation == 1 and (folder / _PENDING).exists())


def _current_folder(home: Path) -> Path | None:
    """The round that CURRENT names, if it exists. Raises StorageFailed."""
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
    """Store the same content under another name, by a hard link if the file system can.

    Returns the name and the digest.
    """
    try:
        os.link(file, name)
        sync_folder(name.parent)
    except OSError:
        atomic_write(name, read_file(file), private=True)
    sums = read_sums(file.parent)
    return {name.name: sums.files[file.name] if sums else digest_of_file(name)}
