"""Files that survive a power cut: a name holds the old content or the new, never half of either."""

import contextlib
import os
import secrets
from pathlib import Path

from fedvit.errors import StorageFailed


def atomic_write(path: Path, *pieces: bytes | memoryview, private: bool = False) -> None:
    """Replace `path` by the pieces, one after the other: written aside, synced, then renamed over the old file.

    A `private` file can be read by its owner alone.

    Raises StorageFailed, naming the file and the reason, when the disk is full or not writable; what
    stood at `path` before is then still there.
    """
    partial = path.parent / f".writing-{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
        raise StorageFailed(
            f"cannot write {path} ({sum(map(len, pieces))} bytes): {error.strerror or error}"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable; without it a power cut may bring the old name back."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
