"""What must survive a power cut on a device: its personal tensors, and the result not yet acknowledged.

Layout: `RUN/round-7-XXXXXXXX/{local.safetensors,result.msgpack,PENDING}`, with a key `local.sealed` in place of
`local.safetensors`; the file `RUN/CURRENT` names the
newest complete round and is replaced atomically. So personal tensors and the result that belongs to them
change together, or not at all. `RUN/TASK` says what the newest task of the run was made of.
"""

import secrets
import shutil
from pathlib import Path

import msgspec

from edge_client.vault_key import VaultKey
from fedvit.errors import BadPayload, ConfigError, StorageFailed
from fedvit.files import atomic_write
from fedvit.tensors import Tensors, mapped, pack, packed_pieces, unpack
from fedvit.wire.messages import Result, Task, TaskKind
from fedvit.wire.topics import check_name

_LOCAL = "local.safetensors"
_SEALED = "local.sealed"
_CURRENT = "CURRENT"
_PENDING = "PENDING"
_TASK = "TASK"


class TaskNote(msgspec.Struct, frozen=True):
    """What a task was made of: enough to put its tensors together again, while their blobs are here."""

    run: str
    round: int
    kind: TaskKind
    seed: int
    program: str  # digest
    groups: dict[str, str]  # group -> digest


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
        if current is None:
            return None
        if (current / _SEALED).is_file():
            return self._opened(current / _SEALED)
        file = current / _LOCAL
        try:
            return mapped(file)
        except OSError as error:
            raise StorageFailed(f"cannot read {file}: {error.strerror}") from error
        except BadPayload as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def check_key(self) -> None:
        """Raises ConfigError now where personal tensors cannot be opened with the key that is given, or without."""
        for current in self._newest():
            if (current / _SEALED).is_file():
                self._opened(current / _SEALED)

    def _newest(self) -> list[Path]:
        homes = sorted(path.parent for path in self.folder.glob(f"*/{_CURRENT}"))
        return [folder for home in homes if (folder := self._current(home.name))]

    def _opened(self, file: Path) -> Tensors:
        """In memory: what is encrypted cannot be mapped."""
        if self._key is None:
            raise ConfigError(f"{file} is encrypted; name the device's key with --vault-key")
        content = self._key.open(_read(file), _place(file.parent))
        try:
            return unpack(content)
        except BadPayload as error:
            raise StorageFailed(f"{file} is damaged: {error}") from error

    def commit(self, result: Result, local: Tensors) -> None:
        """Keep a finished round: personal tensors and result become current in one step."""
        home = self._home(result.run)
        folder = home / f"round-{result.round}-{secrets.token_hex(4)}"
        try:
            if self._key:
                atomic_write(folder / _SEALED, self._key.seal(pack(local), _place(folder)), private=True)
            else:
                atomic_write(folder / _LOCAL, *packed_pieces(local), private=True)
            atomic_write(folder / "result.msgpack", msgspec.msgpack.encode(result), private=True)
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

    def pending(self) -> list[Result]:
        """Results that no coordinator has acknowledged yet."""
        return [_result(folder / "result.msgpack") for folder in self._newest() if (folder / _PENDING).exists()]

    def settle(self, run: str, round_number: int) -> None:
        """The result was acknowledged, or refused for good; the personal tensors stay."""
        if (current := self._current(run)) and self.round_of(run) == round_number:
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
        if not any((folder / name).is_file() for name in (_LOCAL, _SEALED)):
            raise StorageFailed(f"the vault names {folder}, which is not there; move {home} away to start anew")
        return folder


def _place(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _is_current(folder: Path) -> bool:
    try:
        return (folder.parent / _CURRENT).read_text() == folder.name
    except OSError:
        return False


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
