"""What must survive a power cut on a device: its personal tensors, and the result not yet acknowledged.

Layout: `RUN/round-7-XXXXXXXX/{local.safetensors,result.msgpack,PENDING}`; the file `RUN/CURRENT` names the
newest complete round and is replaced atomically. So personal tensors and the result that belongs to them
change together, or not at all. `RUN/TASK` says what the newest task of the run was made of.

Where what is sent back is coded, `left.safetensors` holds what coding left out of the round's result, and
`owed.safetensors` what results before it left out: that is what is owed until the result is accepted.

With a key, tensors are encrypted, in files `*.sealed` in place of `*.safetensors`.
"""

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_client.vault_key import VaultKey
from fedvit.errors import BadPayload, ConfigError, StorageFailed
from fedvit.files import WRITING, atomic_write, sync_folder
from fedvit.tensors import Tensors, mapped, pack, packed_pieces, unpack
from fedvit.wire.messages import Result, Task, TaskKind
from fedvit.wire.topics import check_name

_LOCAL, _LEFT, _OWED = "local", "left", "owed"
_PLAIN, _SEALED = ".safetensors", ".sealed"
_CURRENT = "CURRENT"
_PENDING = "PENDING"
_TASK = "TASK"
_REFUSED = "REFUSED"


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


class Vault:
    """One device's vault, all runs. With a key, personal tensors are encrypted from the next commit on.

    Raises StorageFailed when the disk is full, the old content then stands; and when what is here cannot be
    read. Raises ConfigError when it is encrypted and the key is missing or another one, BadPayload for a run that
    cannot be the name of a folder: it comes from the network.
    """

    def __init__(self, folder: Path, key: VaultKey | None = None) -> None:
        self.folder = folder
        self._key = key

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
        for current in self._newest():
            if (current / f"{_LOCAL}{_SEALED}").is_file():
                self._tensors(current, _LOCAL)

    def _newest(self) -> list[Path]:
        homes = sorted(path.parent for path in self.folder.glob(f"*/{_CURRENT}"))
        return [folder for home in homes if (folder := self._current(home.name))]

    def _tensors(self, folder: Path, name: str) -> Tensors | None:
        """Mapped; or in memory where they are encrypted, which cannot be mapped. None where there are none."""
        file = _there(folder, name)
        if file is None:
            return None
        try:
            if file.suffix != _SEALED:
                return mapped(file)
            if self._key is None:
                raise ConfigError(f"{file} is encrypted; name the device's key with --vault-key")
            return unpack(self._key.open(_read(file), _place(file)))
        except OSError as error:
            raise StorageFailed(f"cannot read {file}: {error.strerror}") from error
        except BadPayload as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def _write(self, folder: Path, name: str, tensors: Tensors) -> None:
        if self._key:
            file = folder / f"{name}{_SEALED}"
            atomic_write(file, self._key.seal(pack(tensors), _place(file)), private=True)
        else:
            atomic_write(folder / f"{name}{_PLAIN}", *packed_pieces(tensors), private=True)

    def commit(self, result: Result, local: Tensors, left: Tensors | None = None, owed: Owed | None = None) -> None:
        """Keep a finished round: personal tensors and result become current in one step.

        `left` is what coding left out of the result, `owed` what was added to it before it was coded.
        """
        home = self._home(result.run)
        folder = home / f"round-{result.round}-{secrets.token_hex(4)}"
        try:
            self._write(folder, _LOCAL, local)
            atomic_write(folder / "result.msgpack", msgspec.msgpack.encode(result), private=True)
            if left:
                self._write(folder, _LEFT, left)
            if owed and owed.file:
                if self._key or owed.file.suffix != _PLAIN:  # what is sealed belongs to its place
                    self._write(folder, _OWED, owed.tensors)
                else:
                    _link(owed.file, folder / f"{_OWED}{_PLAIN}")
            atomic_write(folder / _PENDING, b"")
            atomic_write(home / _CURRENT, folder.name.encode())
        except StorageFailed:
            # what failed last may be the sync behind the rename: then this folder is the current one
            if not _is_current(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        for old in home.glob("round-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        for unfinished in home.glob(f"{WRITING}*"):  # by a process that was killed; no other one writes here
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def pending(self) -> list[Result]:
        """Results that no coordinator has acknowledged yet."""
        return [_result(folder / "result.msgpack") for folder in self._newest() if (folder / _PENDING).exists()]

    def settle(self, run: str, round_number: int, *, accepted: bool = True) -> None:
        """The result was acknowledged, or refused for good; the personal tensors stay."""
        if (current := self._current(run)) and self.round_of(run) == round_number:
            if not accepted and (current / _PENDING).exists():
                atomic_write(current / _REFUSED, b"")  # before PENDING goes: else a power cut would make it accepted
            try:
                (current / _PENDING).unlink(missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"cannot delete {current / _PENDING}: {error.strerror}") from error

    def note(self, task: Task) -> None:
        """Remember what the run's newest task is made of."""
        note = TaskNote(task.run, task.round, task.kind, task.seed, task.program, task.groups)
        atomic_write(self._home(task.run) / _TASK, msgspec.msgpack.encode(note), private=True)

    def noted(self, run: str) -> TaskNote | None:
        """The newest task of the run that was begun here; None before the first."""
        file = self._home(run) / _TASK
        if not file.exists():
            return None
        try:
            return msgspec.msgpack.decode(_read(file), type=TaskNote)
        except msgspec.MsgspecError as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def runs(self) -> list[str]:
        """Runs that this device has worked for, the newest first."""
        notes = sorted(self.folder.glob(f"*/{_TASK}"), key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in notes]

    def _home(self, run: str) -> Path:
        try:
            return self.folder / check_name(run, "run")
        except ConfigError as error:
            raise BadPayload(str(error)) from None

    def _current(self, run: str) -> Path | None:
        home = self._home(run)
        try:
            folder = home / (home / _CURRENT).read_text()
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


def _is_current(folder: Path) -> bool:
    try:
        return (folder.parent / _CURRENT).read_text() == folder.name
    except OSError:
        return False


def _link(file: Path, name: Path) -> None:
    """The same content under another name: without writing it again, where the file system can."""
    try:
        os.link(file, name)
        sync_folder(name.parent)
    except OSError:
        atomic_write(name, _read(file), private=True)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StorageFailed(f"cannot read {file}: {error.strerror}") from error


def _result(file: Path) -> Result:
    try:
        return msgspec.msgpack.decode(_read(file), type=Result)
    except msgspec.MsgspecError as error:
        raise StorageFailed(f"{file} is damaged: {error}") from error
