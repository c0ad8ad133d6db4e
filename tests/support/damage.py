"""Damage to files as memory cards cause it, which neither size nor date tell, and folders that nobody may read."""

import os
from pathlib import Path
from typing import Any

import pytest


def flip(path: Path, place: float = 0.5, mask: int = 0x10, *, keep_date: bool = True) -> None:
    """Flip bits of the byte at this part of a file. Size and inode stay as they are, and so does the modification time,
    unless `keep_date` is off: then it is as if a program had written there."""
    state = path.stat()
    at = min(state.st_size - 1, int(state.st_size * place))
    handle = os.open(path, os.O_RDWR)
    try:
        [byte] = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte ^ mask]), at)
    finally:
        os.close(handle)
    if keep_date:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def forbid_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let nobody look into folders of this name, as if they were of another user; root, too, whose test it may be."""
    stat = os.stat

    def refuse(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if not isinstance(path, int) and Path(os.fsdecode(path)).parent.name == name:
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refuse)
