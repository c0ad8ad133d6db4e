"""The files of one round in the vault: tensors, encrypted or not, the result, and their checksums."""

import contextlib
import functools
import os
from pathlib import Path

import msgspec

from edge_client.storage.sums import SUMS, read_file, read_sums
from edge_client.storage.vault_key import VaultKey
from fedvit.blobs import Verified, digest_of, digest_of_file, medium_failed
from fedvit.errors import BadPayload, ConfigError, Damaged
from fedvit.files import atomic_write, storage_failed, sync_folder
from fedvit.tensors import Tensors, map_tensors, pack, pack_in_pieces, unpack
from fedvit.wire.messages import Result
from fedvit.wire.topics import check_name

LOCAL, NEW_RESIDUAL, RESIDUAL = "local", "left", "owed"
PLAIN, SEALED = ".safetensors", ".sealed"
RESULT = "result.msgpack"
CURRENT = "CURRENT"
PENDING = "PENDING"
REFUSED = "REFUSED"


class RoundFiles:
    """Reads and writes the files of rounds. With a key, tensors are encrypted when they are written."""

    def __init__(self, key: VaultKey | None) -> None:
        self.key = key
        self._verified = Verified()

    def read_tensors(self, folder: Path, name: str) -> Tensors | None:
        """Return mapped tensors, or tensors in memory if they are encrypted. None if there are none.

        Raises Damaged, StorageFailed, ConfigError for encrypted ones without the key.
        """
        file = find_file(folder, name)
        if file is None:
            return None
        if file.suffix == SEALED and self.key is None:
            raise ConfigError("FV1417", f"{file} is encrypted; name the device's key with --vault-key")
        if not self.is_whole(file):
            raise Damaged("FV1704", f"{file} is damaged")
        try:
            if file.suffix == SEALED and self.key:
                return unpack(self.key.open(read_file(file), path_in_vault(file)))
            return map_tensors(file)
        except OSError as error:
            raise storage_failed(f"cannot read {file}", error) from error
        except BadPayload as error:
            raise Damaged("FV1704", f"{file} is damaged: {error}") from error

    def write_tensors(self, folder: Path, name: str, tensors: Tensors) -> dict[str, str]:
        """Write tensors, and return the file's name and digest."""
        file = folder / f"{name}{SEALED if self.key else PLAIN}"
        pieces = [self.key.seal(pack(tensors), path_in_vault(file))] if self.key else pack_in_pieces(tensors)
        atomic_write(file, *pieces, private=True)
        return {file.name: digest_of(*pieces)}

    def copy_tensors(self, file: Path, tensors: Tensors, folder: Path, name: str) -> dict[str, str]:
        """Store the tensors of a file under another name; return that and the digest."""
        if self.key or file.suffix != PLAIN:  # encryption binds a file to its path
            return self.write_tensors(folder, name, tensors)
        return link_file(file, folder / f"{name}{PLAIN}")

    def read_result(self, folder: Path) -> Result:
        """Return the result of a round. Raises Damaged, StorageFailed."""
        file = folder / RESULT
        if not self.is_whole(file):
            raise Damaged("FV1704", f"{file} is damaged")
        try:
            return msgspec.msgpack.decode(read_file(file), type=Result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged("FV1704", f"{file} is damaged: {error}") from error

    def is_whole(self, file: Path) -> bool:
        """Return True if a file has the digest that its round's checksums name."""
        with contextlib.suppress(BadPayload):
            sums = read_sums(file.parent)
            return sums is not None and file.name in sums.files and self._verified.is_whole(file, sums.files[file.name])
        return False

    def list_damaged(self, folder: Path, *, tensors: bool = True) -> list[Path]:
        """Return damaged files without which a round cannot be used."""
        try:
            sums = read_sums(folder)
        except BadPayload:
            sums = None
        if sums is None:
            return [folder / SUMS]
        file = find_file(folder, LOCAL)
        if file is None:
            return [folder / f"{LOCAL}{PLAIN}"]
        return [file] if tensors and not self.is_whole(file) else []


@functools.lru_cache(maxsize=1024)  # a task asks for it 17 times
def find_run_folder(vault: Path, run: str) -> Path:
    """Return the folder of a run in a vault. Raises BadPayload for an invalid name: it comes from the network."""
    try:
        return vault / check_name(run, "run")
    except ConfigError as error:
        raise BadPayload(error.code, str(error)) from None


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file with some tensors of a round, plain or encrypted; None if there is none."""
    files = (folder / f"{name}{suffix}" for suffix in (SEALED, PLAIN))
    return next((file for file in files if file.is_file()), None)


def path_in_vault(file: Path) -> str:
    return f"{file.parent.parent.name}/{file.parent.name}/{file.stem}"


def list_rounds(home: Path) -> list[Path]:
    """Return the stored rounds of a run. Raises StorageFailed."""
    try:
        return [home / name for name in os.listdir(home) if name.startswith("round-")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_failed(f"cannot read {home}", error) from error


def count_earlier_rounds(folder: Path | None) -> int:
    """Return the count of rounds before this one; 0 for the first."""
    if folder is not None:
        with contextlib.suppress(BadPayload):
            sums = read_sums(folder)
            return sums.generation if sums else 0
    return 0


def parse_round(folder: Path) -> int:
    """Return the round number of a folder; 0 if its name has none."""
    with contextlib.suppress(IndexError, ValueError):
        return int(folder.name.split("-")[1])
    return 0


def is_unfinished(folder: Path) -> bool:
    """Return True for a run's first round if the process ended before `CURRENT` named it.

    If `CURRENT` did name it, and was lost, no acknowledgement of the round has arrived: then it is trained again, from
    the values it began with, to the same result.
    """
    try:
        sums = read_sums(folder)
    except BadPayload:
        return False
    return sums is None or (sums.generation == 1 and (folder / PENDING).exists())


def find_current(home: Path) -> Path | None:
    """Return the round that CURRENT names, if it exists. Raises StorageFailed."""
    try:
        folder = home / (home / CURRENT).read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        if medium_failed(error):
            return None
        raise storage_failed(f"cannot read {home / CURRENT}", error) from error
    return folder if folder in list_rounds(home) else None


def find_round(home: Path, upto: int) -> Path | None:
    """Return the newest complete round up to a round; None if there is none. Raises StorageFailed."""
    complete = [folder for folder in list_rounds(home) if count_earlier_rounds(folder) and parse_round(folder) <= upto]
    return max(complete, key=lambda folder: (parse_round(folder), count_earlier_rounds(folder)), default=None)


def list_replaced(home: Path, best: int) -> list[Path]:
    """Return the rounds that the next commit replaces: all but the newest, and the newest up to round `best`."""
    kept = {find_current(home), find_round(home, best) if best else None}
    return [folder for folder in list_rounds(home) if folder not in kept]


def link_file(file: Path, name: Path) -> dict[str, str]:
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
