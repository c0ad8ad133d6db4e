"""Measure the disk below a folder with files of a few MB, written and read from end to end."""

import contextlib
import os
import secrets
import time
from pathlib import Path

from msgspec import Struct

from fedvit.errors import StorageFailed

SIZE_BYTES = 8 * 2**20
PIECE_BYTES = 2**20


class DiskSpeed(Struct, frozen=True, kw_only=True):
    """Bytes per second; writing includes the sync."""

    size_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float  # the system was asked to forget the file before; a disk in memory cannot


def measure_disk(folder: Path, size_bytes: int = SIZE_BYTES) -> DiskSpeed:
    """Write, sync and read a file of random bytes in `folder`, which is created if needed; the file is deleted.

    Raises StorageFailed, naming the reason.
    """
    path = folder / f".speed-{secrets.token_hex(8)}"
    # random, because some disks compress
    pieces = [os.urandom(PIECE_BYTES)] * max(1, size_bytes // PIECE_BYTES)
    size = sum(map(len, pieces))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(path, "xb", buffering=0) as file:
            began = time.perf_counter()
            for piece in pieces:
                file.write(piece)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(path, "rb", buffering=0) as file:
            began = time.perf_counter()
            while file.read(PIECE_BYTES):
                pass
            read_s = time.perf_counter() - began
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot write {size} bytes in {folder}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return DiskSpeed(size_bytes=size, write_bytes_per_s=size / write_s, read_bytes_per_s=size / read_s)
