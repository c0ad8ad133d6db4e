"""A real ext4 whose power can be cut: what was not synced is lost. It needs root, and a loop device.

The file system is shut down by the call that its own tests have for that, and mounted again, which replays its
journal. A cut takes a second, as nothing is emulated. tests/boards has whole boards, whose disks lose parts of a flush.
"""

import fcntl
import os
import random
import struct
import subprocess
from pathlib import Path

from tests.support.waiting import wait_until

SHUT_DOWN = 0x8004587D
LOSE_DATA, LOSE_JOURNAL = 1, 2
"""Kinds of cut: data of files that were not synced is lost, or the last changes of names and sizes, too."""


class CutDisk:
    """A disk in a file, mounted at a folder."""

    def __init__(self, file: Path, folder: Path, seed: int, size_mb: int = 512) -> None:
        self.file, self.folder = file, folder
        self.cuts = 0
        self._drawn = random.Random(seed)
        folder.mkdir(parents=True)
        with file.open("wb") as made:
            made.truncate(size_mb << 20)
        run("mke2fs", "-q", "-t", "ext4", str(file))
        self.mount()

    def mount(self) -> None:
        # the kernel writes nothing by itself for so long: only what a program syncs survives
        run("mount", "-o", "loop,noatime,commit=300", str(self.file), str(self.folder))

    def cut(self) -> None:
        """Cut its power, and give it power again. Programs that used it were killed before."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            lost = self._drawn.choice((LOSE_DATA, LOSE_JOURNAL))
            fcntl.ioctl(folder, SHUT_DOWN, struct.pack("I", lost))
        finally:
            os.close(folder)
        self.cuts += 1
        self.unmount()
        self.mount()

    def unmount(self) -> None:
        """Unmount it, once the last child of a killed program has ended."""
        wait_until(
            lambda: subprocess.run(["umount", str(self.folder)], capture_output=True, check=False).returncode == 0,
            f"{self.folder} is in use",
            pause_s=0.05,
        )


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
