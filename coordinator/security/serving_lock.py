"""The lock of a deployment: one process serves it.

`coordinator enroll` and short questions hold it for now: they give it to a coordinator that wants to serve, which waits
for that. So a person may type `coordinator start` and `coordinator enroll` in any order.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fedvit.errors import ConfigError

LOCK, WANTED = Path("run", "served"), Path("run", "wanted")
FOR_NOW = " for now"
HAND_OVER_S = 60.0
"""Longest wait for a process that holds the lock for now; it ends its broker meanwhile."""
TICK_S = 0.05


@contextlib.contextmanager
def exclusively_served(folder: Path, *, for_now: bool = False) -> Iterator[None]:
    """Hold the lock of the deployment in `folder`; `for_now`: until `is_wanted`.

    Raises ConfigError, naming the process, if another one holds it, and does not hand it over.
    """
    with _open(folder / LOCK) as handle:
        if not _lock(handle):
            _wait_for_hand_over(folder, handle, for_now=for_now)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}{FOR_NOW if for_now else ''}".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(handle, 0)


def is_wanted(folder: Path) -> bool:
    """Return whether a process waits for the lock, which this one holds for now."""
    with _open(folder / WANTED) as handle:
        return not _lock(handle)


def _wait_for_hand_over(folder: Path, handle: int, *, for_now: bool) -> None:
    until = time.monotonic() + HAND_OVER_S
    with _open(folder / WANTED) as wanted:
        fcntl.flock(wanted, fcntl.LOCK_SH)
        while not _lock(handle):
            owner = os.pread(handle, 32, 0).decode().strip()  # "" for the instant in which a process gets the lock
            stays = owner and (for_now or not owner.endswith(FOR_NOW))
            if stays or time.monotonic() > until:
                pid = owner.removesuffix(FOR_NOW)
                raise ConfigError("FV1314", f"{folder} is being served by process {pid}")
            time.sleep(TICK_S)


@contextlib.contextmanager
def _open(file: Path) -> Iterator[int]:
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
