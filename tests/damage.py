"""What a memory card does to files: a bit is another one, and neither size nor date tell."""

import os
from pathlib import Path


def flip(path: Path, place: float = 0.5, mask: int = 0x10) -> None:
    """Flip bits of the byte at this part of a file; size, modification time and inode stay as they are."""
    state = path.stat()
    at = min(state.st_size - 1, int(state.st_size * place))
    handle = os.open(path, os.O_RDWR)
    try:
        [byte] = os.pread(handle, 1, at)
        os.pwrite(handle, bytes([byte ^ mask]), at)
    finally:
        os.close(handle)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
