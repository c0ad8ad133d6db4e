"""What several processes of one test session need, made by whichever of them comes first."""

import fcntl
from collections.abc import Callable
from pathlib import Path


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by `make` unless another process has done so; other processes wait meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder
