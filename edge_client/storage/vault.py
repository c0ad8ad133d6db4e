"""The storage of a device that survives power cuts: personal tensors, and the unacknowledged result.

Layout: `RUN/round-7-XXXXXXXX/{local.safetensors,result.msgpack,PENDING,SUMS}`; the file `RUN/CURRENT` names the
newest complete round and is replaced atomically. So personal tensors and the result that belongs to them
change together, or not at all. `RUN/TASK` describes the newest task of the run, and `RUN/OVER` marks a run that will
not be resumed. A run is removed by renaming it to `.removed/XXXX` first: it is there completely, or not at all.

If uploads are coded, `left.safetensors` holds the residual after the round's result (error feedback), and
`owed.safetensors` the residual before it, which is valid until the result is accepted.

With a key, tensors are encrypted, in files `*.sealed` in place of `*.safetensors`.

`SUMS` holds the digests of a round's files, and the round before the newest is kept: if a file is damaged,
`edge_client.storage.repair` returns to it. The round that the run's best model uses is kept, too
(`edge_client.storage.best_round`).
"""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_client.storage.round_files import (
    CURRENT,
    LOCAL,
    NEW_RESIDUAL,
    PENDING,
    PLAIN,
    REFUSED,
    RESIDUAL,
    RESULT,
    SEALED,
    RoundFiles,
    count_earlier_rounds,
    find_current,
    find_file,
    find_round,
    find_run_folder,
    list_replaced,
    list_rounds,
    parse_round,
)
from edge_client.storage.sums import Sums, read_sums, write_sums
from edge_client.storage.task_notes import TaskNotes
from edge_client.storage.vault_key import VaultKey
from fedvit.blobs import digest_of
from fedvit.errors import BadPayload, StorageFailed
from fedvit.files import WRITING, atomic_write, folder_bytes, make_folder, name_failure, sync_folder
from fedvit.tensors import Tensors
from fedvit.wire.messages import Result
from fedvit.wire.topics import is_name

_OVER = "OVER"
_REMOVED = ".removed"


class Residual(NamedTuple):
    """The part of results that coding left out, and the file that holds it; None if there is nothing."""

    file: Path | None
    tensors: Tensors


NO_RESIDUAL = Residual(None, {})


class Vault:
    """One device's vault, all runs. With a key, personal tensors are encrypted from the next commit on.

    Raises StorageFailed when the disk is full, which leaves the old content, and when a file cannot be read. Raises
    ConfigError when it is encrypted and the key is missing or wrong, BadPayload for a run that cannot be the name of a
    folder: it comes from the network.
    """

    def __init__(self, folder: Path, key: VaultKey | None = None) -> None:
        self.folder = folder
        self.round_files = RoundFiles(key)
        self.notes = TaskNotes(folder)

    def path(self, run: str) -> Path:
        """Return the folder of a run. Raises BadPayload for an invalid name."""
        return find_run_folder(self.folder, run)

    def round_of(self, run: str, upto: int | None = None) -> int:
        """Return the newest stored round, or the newest up to a round; 0 if there is none."""
        folder = self._find(run, upto)
        return int(folder.name.split("-")[1]) if folder else 0

    def local(self, run: str, upto: int | None = None) -> Tensors | None:
        """Return the personal tensors as `round_of` left them; None if there is no such round."""
        folder = self._find(run, upto)
        return None if folder is None else self.round_files.read_tensors(folder, LOCAL)

    def residual(self, run: str) -> Residual:
        """Return the part of this device's accepted results that coding left out (error feedback).

        A result that was refused, or not acknowledged yet, does not change the residual.
        """
        current = self._current(run)
        if current is None:
            return NO_RESIDUAL
        accepted = not any((current / name).exists() for name in (PENDING, REFUSED))
        name = NEW_RESIDUAL if accepted else RESIDUAL
        tensors = self.round_files.read_tensors(current, name)
        return NO_RESIDUAL if tensors is None else Residual(find_file(current, name), tensors)

    def check_key(self) -> None:
        """Raise ConfigError if personal tensors cannot be decrypted with the key of this vault, or without one."""
        for file in sorted(self.folder.glob(f"*/round-*/{LOCAL}{SEALED}")):
            if self.round_files.key is None or self.round_files.is_whole(file):  # a damaged file fails with any key
                self.round_files.read_tensors(file.parent, LOCAL)

    def commit(
        self,
        result: Result,
        local: Tensors,
        new_residual: Tensors | None = None,
        residual: Residual | None = None,
        *,
        best: int = 0,
    ) -> None:
        """Store a finished round: personal tensors and result become current in one step.

        The round before is kept, and the newest up to round `best`. `residual` is that of earlier results,
        `new_residual` the one after this result.
        """
        home = self.path(result.run)
        folder = home / f"round-{result.round}-{secrets.token_hex(4)}"
        before = find_current(home)
        for old in list_replaced(home, best):  # now, so that there are never more than three
            shutil.rmtree(old, ignore_errors=True)
        try:
            files = self.round_files.write_tensors(folder, LOCAL, local)
            content = msgspec.msgpack.encode(result)
            atomic_write(folder / RESULT, content, private=True)
            files[RESULT] = digest_of(content)
            if new_residual:
                files |= self.round_files.write_tensors(folder, NEW_RESIDUAL, new_residual)
            if residual and residual.file:
                files |= self.round_files.copy_tensors(residual.file, residual.tensors, folder, RESIDUAL)
            atomic_write(folder / PENDING, b"")
            write_sums(folder, Sums(count_earlier_rounds(before) + 1, files))
            atomic_write(home / CURRENT, folder.name.encode())
        except StorageFailed:
            # if only the sync after the rename failed, this folder is the current one
            if find_current(home) != folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if self.round_files.key:  # unencrypted files from before the key are removed
            for file in [*home.glob(f"round-*/*{PLAIN}"), *home.glob(f"damaged-*/*{PLAIN}")]:
                shutil.rmtree(file.parent, ignore_errors=True)
        for unfinished in home.glob(f"{WRITING}*"):  # by a process that was killed; no other one writes here
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def count_replaced_bytes(self, run: str, best: int = 0) -> int:
        """Return how many bytes the run's next commit removes before it writes."""
        return sum(map(folder_bytes, list_replaced(self.path(run), best)))

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield all files with checksums, and their expected digests."""
        for folder in self.folder.glob("*/round-*"):
            with contextlib.suppress(BadPayload):
                sums = read_sums(folder)
                for name, digest in sums.files.items() if sums else ():
                    yield folder / name, digest

    # --- results ------------------------------------------------------------------------------------

    def pending(self) -> list[Result]:
        """Return the results that no coordinator has acknowledged yet."""
        runs = sorted(path.parent.name for path in self.folder.glob(f"*/{CURRENT}"))
        newest = [folder for run in runs if (folder := self._current(run))]
        return [self.round_files.read_result(folder) for folder in newest if (folder / PENDING).exists()]

    def has_pending(self, run: str) -> bool:
        """Return True if a result of the run is not acknowledged yet. Raises StorageFailed."""
        return any((folder / PENDING).exists() for folder in list_rounds(self.path(run)))

    def settle(self, run: str, round_number: int, *, accepted: bool = True) -> None:
        """Mark the result as acknowledged, or as refused for good; the personal tensors are kept."""
        for folder in list_rounds(self.path(run)):  # also the round before, to which a repair may return
            if parse_round(folder) != round_number or not (folder / PENDING).exists():
                continue
            if not accepted:
                # before PENDING is removed: else a power cut would make the result accepted
                atomic_write(folder / REFUSED, b"")
            with name_failure(f"cannot delete {folder / PENDING}", StorageFailed, "FV1703"):
                (folder / PENDING).unlink(missing_ok=True)

    def folders(self) -> list[str]:
        """Return the runs that have a folder here, in no order."""
        with contextlib.suppress(FileNotFoundError):
            return [path.name for path in self.folder.iterdir() if is_name(path.name)]
        return []

    # --- the end of a run -----------------------------------------------------------------------------

    def end(self, run: str) -> None:
        """Mark the run as over for good: an unacknowledged result counts as refused. Does nothing for an unknown run.
        Raises StorageFailed."""
        home = self.path(run)
        if not home.is_dir():
            return
        for folder in list_rounds(home):
            self.settle(run, parse_round(folder), accepted=False)
        atomic_write(home / _OVER, b"")

    def reopen(self, run: str) -> None:
        """Remove the mark of `end`: a task of the run arrived. Raises StorageFailed."""
        file = self.path(run) / _OVER
        with name_failure(f"cannot delete {file}"):
            file.unlink(missing_ok=True)

    def is_over(self, run: str) -> bool:
        """Return True if this device was informed that the run is over for good."""
        return (self.path(run) / _OVER).exists()

    def _current(self, run: str) -> Path | None:
        home = self.path(run)
        try:
            folder = home / (home / CURRENT).read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed("FV1702", f"cannot read {home / CURRENT}: {error.strerror}") from error
        if find_file(folder, LOCAL) is None:
            raise StorageFailed(
                "FV1704", f"the vault names {folder}, which does not exist; move {home} away to start again"
            )
        return folder

    def _find(self, run: str, upto: int | None) -> Path | None:
        """Return the newest stored round, or the newest up to a round."""
        current = self._current(run)
        if current is None or upto is None or parse_round(current) <= upto:
            return current
        return find_round(self.path(run), upto)


# --- removal ------------------------------------------------------------------------------------------


def remove_run(vault: Vault, run: str) -> None:
    """Remove a run in one step: after a kill or a power cut it is here completely, or not at all.

    Raises StorageFailed; files that could not be deleted are then listed by `list_removed`.
    """
    home, removed = vault.path(run), vault.folder / _REMOVED
    with name_failure(f"cannot remove {home}"):
        if home.is_dir():
            make_folder(removed)
            home.rename(removed / secrets.token_hex(8))
            sync_folder(removed)
            sync_folder(vault.folder)  # before anything is deleted: else a power cut could restore half of it
    finish_removals(vault)


def list_removed(vault: Vault) -> list[Path]:
    """Return the remains of runs whose removal was interrupted."""
    return list((vault.folder / _REMOVED).glob("*"))


def finish_removals(vault: Vault) -> None:
    """Delete the remains of runs whose removal was interrupted. Raises StorageFailed."""
    for folder in list_removed(vault):
        with name_failure(f"cannot delete {folder}"):
            shutil.rmtree(folder)
