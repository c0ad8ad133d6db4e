"""Files that survive a power cut: a name holds the old content or the new, never half of either."""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fedvit.descriptors import USED_UP, how_many
from fedvit.errors import DiskFull, FedvitError, StorageFailed, TooManyOpenFiles

log = logging.getLogger(__name__)

WRITING = ".writing-"
"""Prefix of the names of incomplete files, which are useless after a crash."""
SYNCS_AT_ONCE = 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OTHERS = 0o077
"""Rights of a file's group and of everybody else."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Make files and folders readable by their owner only, in this process and its children, until the context ends.

    For programs that store data derived from images: features, tensors, logs. It sets the process's umask, so that
    files of libraries (databases, their journals) are private, too. Output for the user is written outside of it.
    """
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def make_private(paths: Iterable[Path]) -> None:
    """Remove the rights of other users from files and folders; missing ones are ignored.

    Files of another user are left as they are, with a warning. A private folder protects everything below it.
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


def atomic_write(path: Path, *pieces: bytes | memoryview, private: bool = False, durable: bool = True) -> None:
    """Replace `path` by the concatenated pieces: written to another name, synced, then renamed over the old file.

    A `private` file can be read by its owner only. A file that is not `durable` is not synced: readers see the old
    content or the new, and after a power cut it may be empty or damaged.

    Raises StorageFailed, naming the file and the reason, when the disk is not writable, and DiskFull when it
    is full; the old content of `path` is unchanged then.
    """
    partial = path.parent / f"{WRITING}{secrets.token_hex(8)}"
    try:
        _write(partial, *pieces, private=private)
        if durable:
            sync_file(partial)
        os.replace(partial, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise storage_failed(f"cannot write {path} ({sum(map(len, pieces))} bytes)", error) from error


class FileGroup:
    """New files that become durable together, so that the program waits for the disk once and not for each file.

    Until `commit` none of them has its name.
    """

    def __init__(self) -> None:
        self._partials: dict[Path, Path] = {}  # by final name

    def write(self, path: Path, *pieces: bytes | memoryview) -> None:
        """Write a file like `atomic_write`, but not durable yet. Raises StorageFailed, DiskFull."""
        partial = path.parent / f"{WRITING}{secrets.token_hex(8)}"
        self._partials[path] = partial
        with name_failure(f"cannot write {path} ({sum(map(len, pieces))} bytes)"):
            _write(partial, *pieces)

    def commit(self) -> None:
        """Make all files durable under their names. Raises StorageFailed, DiskFull: some of them may exist then."""
        if not self._partials:
            return
        count = len(self._partials)
        # the journal of a file system handles the syncs of several threads together
        with name_failure(f"cannot write {count} files"), ThreadPoolExecutor(min(SYNCS_AT_ONCE, count)) as pool:
            _all_done(pool.map(sync_file, self._partials.values()))
            for path, partial in self._partials.items():
                os.replace(partial, path)
            _all_done(pool.map(sync_folder, {path.parent for path in self._partials}))
        self._partials.clear()

    def abandon(self) -> None:
        """Delete the files that are not committed."""
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
    """Wait until the file's content is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _all_done(calls: Iterable[None]) -> None:
    for _ in calls:
        pass


def storage_failed(what: str, error: OSError) -> StorageFailed:
    """The error for a failed operation `what`: DiskFull without disk space, TooManyOpenFiles without descriptors."""
    if error.errno in USED_UP:
        return TooManyOpenFiles(TooManyOpenFiles.general_code, f"{what}: {error.strerror}; {how_many()}")
    kind = DiskFull if error.errno in _FULL else StorageFailed
    return kind(kind.general_code, f"{what}: {error.strerror or error}")


@contextlib.contextmanager
def name_failure(what: str, kind: type[FedvitError] | None = None, code: str = "") -> Iterator[None]:
    """Raise an error that names the operation `what` for an OSError in the block, by default as `storage_failed`."""
    try:
        yield
    except OSError as error:
        if kind is None:
            raise storage_failed(what, error) from error
        raise kind(code, f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def hold_lock(file: Path) -> Iterator[None]:
    """Wait until no other thread or process holds the lock of a file, and hold it. Raises StorageFailed."""
    with name_failure(f"cannot open {file}"):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents durably: a synced file is lost if a power cut removes the name of its folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable; without it a power cut may undo the rename."""
    sync_file(folder)


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder, without following links; 0 if there is none."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return total
