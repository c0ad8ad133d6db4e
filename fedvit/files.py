"""Files that survive a power cut: a name holds the old content or the new, never half of either."""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedvit.descriptors import USED_UP, how_many
from fedvit.errors import DiskFull, StorageFailed, TooManyOpenFiles

log = logging.getLogger(__name__)

WRITING = ".writing-"
"""Begins the name of a file that is not complete yet; after a crash nobody needs it."""
SYNCS_AT_ONCE = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OTHERS = 0o077
"""Rights of a file's group and of everybody else."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Within it this process, and those that it starts, make files and folders that their owner alone can read.

    For programs that keep what follows from images: features, tensors, logs. It is the process's umask, so that files
    which libraries make (databases, their journals) are private, too. What a person asks for as output is written
    outside of it.
    """
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def make_private(paths: Iterable[Path]) -> None:
    """Take the rights of others from files and folders that an earlier version left open; what is missing is no fault.

    What another user owns stays as it is, with a warning. Below a private folder nothing can be reached.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode & 0o7777
            if mode & _OTHERS:
                path.chmod(mode & ~_OTHERS)
        except FileNotFoundError:
            continue
        except PermissionError:
            log.warning("others can read this folder or file, and its owner is another user", extra={"path": str(path)})


def atomic_write(path: Path, *pieces: bytes | memoryview, private: bool = False) -> None:
    """Replace `path` by the pieces, one after the other: written aside, synced, then renamed over the old file.

    A `private` file can be read by its owner alone.

    Raises StorageFailed, naming the file and the reason, when the disk is not writable, and DiskFull when it
    is full; what stood at `path` before is then still there.
    """
    partial = path.parent / f"{WRITING}{secrets.token_hex(8)}"
    try:
        _write(partial, *pieces, private=private)
        sync_file(partial)
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise storage_failed(f"cannot write {path} ({sum(map(len, pieces))} bytes)", error) from error


class FileGroup:
    """New files that become durable at the same time: they wait for the disk once, not each for itself.

    Until `commit` none of them has its name.
    """

    def __init__(self) -> None:
        self._partials: dict[Path, Path] = {}  # by final name

    def write(self, path: Path, *pieces: bytes | memoryview) -> None:
        """As `atomic_write`, but not durable yet. Raises StorageFailed, DiskFull."""
        partial = path.parent / f"{WRITING}{secrets.token_hex(8)}"
        self._partials[path] = partial
        try:
            _write(partial, *pieces)
        except OSError as error:
            raise storage_failed(f"cannot write {path} ({sum(map(len, pieces))} bytes)", error) from error

    def commit(self) -> None:
        """Now all are there, also after a power cut. Raises StorageFailed, DiskFull: some may be there then."""
        if not self._partials:
            return
        try:
            # journals of file systems write down at once what several threads wait for
            with ThreadPoolExecutor(min(SYNCS_AT_ONCE, len(self._partials))) as pool:
                _all_done(pool.map(sync_file, self._partials.values()))
                for path, partial in self._partials.items():
                    os.replace(partial, path)
                _all_done(pool.map(sync_folder, {path.parent for path in self._partials}))
        except OSError as error:
            raise storage_failed(f"cannot write {len(self._partials)} files", error) from error
        self._partials.clear()

    def abandon(self) -> None:
        """Nothing of what is not committed stays."""
        for partial in self._partials.values():
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        self._partials.clear()


def _write(path: Path, *pieces: bytes | memoryview, private: bool = False) -> None:
    make_folder(path.parent)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    with os.fdopen(handle, "wb") as file:
        file.writelines(pieces)


def sync_file(path: Path) -> None:
    """What was written to it is on the disk after this. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _all_done(calls: Iterable[None]) -> None:
    for _ in calls:
        pass


def storage_failed(what: str, error: OSError) -> StorageFailed:
    """`what` could not be done, and why: DiskFull where it is for want of room, TooManyOpenFiles of descriptors."""
    if error.errno in USED_UP:
        return TooManyOpenFiles(f"{what}: {error.strerror}; {how_many()}")
    kind = DiskFull if error.errno in _FULL else StorageFailed
    return kind(f"{what}: {error.strerror or error}")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably: a synced file in a folder whose own name a power cut takes is lost."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable; without it a power cut may bring the old name back."""
    sync_file(folder)


def folder_bytes(folder: Path) -> int:
    """Of all files below it, links not followed; 0 when there is none."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return total
