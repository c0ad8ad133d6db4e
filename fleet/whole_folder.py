"""A folder that takes its place when all of it is written."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

NEW, OLD = "partial", "replaced"


@contextmanager
def make_whole(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out` at the end; after a failure `out` is unchanged.

    What a killed process has left there is tidied up first. Raises OSError.
    """
    out = out.resolve()  # behind a symlink, renaming works only beside the folder itself
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.{NEW}")
    with _hold(out.parent):
        _tidy_up(out)
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        _lock(lock)
    try:
        yield partial
        with _hold(out.parent):
            _put_in_place(partial, out)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _tidy_up(out: Path) -> None:
    """Remove the folders of processes that were killed; bring back what one of them was about to replace."""
    for left in out.parent.glob(f".{escape(out.name)}.*.{OLD}"):
        if out.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(out)
    for left in out.parent.glob(f".{escape(out.name)}.*.{NEW}"):
        handle = os.open(left, os.O_RDONLY)
        if _lock(handle, fcntl.LOCK_NB):
            shutil.rmtree(left, ignore_errors=True)
        os.close(handle)


def _put_in_place(partial: Path, out: Path) -> None:
    if not out.is_dir():
        partial.rename(out)
        return
    replaced = out.with_name(f".{out.name}.{os.getpid()}.{OLD}")
    out.rename(replaced)
    try:
        partial.rename(out)
    except OSError:
        replaced.rename(out)
        raise
    shutil.rmtree(replaced)


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def _lock(folder: int, how: int = 0) -> bool:
    """Lock a folder until it is closed, at the latest with this process; False: another has it, or it has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | how)
    except OSError:  # NFS locks no folders
        return False
    return True
