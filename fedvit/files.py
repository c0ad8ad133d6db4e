"""Files that survive a power cut: a name holds the old content or the new, never half of either."""

import contextlib
import errno
import os
import secrets
from pathlib import Path

from fedvit.errors import DiskFull, StorageFailed

WRITING = ".writing-"
"""Begins the name of a file that is not complete yet; after a crash nobody needs it."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def atomic_write(path: Path, *pieces: bytes | memoryview, private: bool = False) -> None:
    """Replace `path` by the pieces, one after the other: written aside, synced, then renamed over the old file.

    A `private` file can be read by its owner alone.

    Raises StorageFailed, naming the file and the reason, when the disk is not writable, and DiskFull when it
    is full; what stood at `path` before is then still there.
    """
    partial = path.parent / f"{WRITING}{secrets.token_hex(8)}"
    try:
        make_folder(path.parent)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise storage_failed(f"cannot write {path} ({sum(map(len, pieces))} bytes)", error) from error


def storage_failed(what: str, error: OSError) -> StorageFailed:
    """`what` could not be done, and why: DiskFull where it is for want of room."""
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
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
