"""A hard limit on the memory of a process: a memory cgroup where the machine allows one, else an rlimit."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

Kind = Literal["cgroup-v2", "cgroup-v1", "rlimit"]
CGROUPS = Path("/sys/fs/cgroup")
EMPTY_S = 5.0


class MemoryLimit(Protocol):
    """A limit that `limited` yields."""

    kind: Kind

    def command(self, command: Sequence[str]) -> list[str]:
        """A command line that starts under the limit."""

    def peak_bytes(self) -> int | None:
        """Peak memory as the limit counts it; None where it counts none."""

    def kills(self) -> int:
        """Number of processes that were killed for lack of memory."""


class Cgroup:
    """A memory cgroup in `folder`. Raises OSError where it has no memory controller."""

    def __init__(self, folder: Path, kind: Literal["cgroup-v2", "cgroup-v1"], limit_bytes: int) -> None:
        self.folder = folder
        self.kind: Kind = kind
        settings = {
            "cgroup-v2": {"memory.max": limit_bytes, "memory.swap.max": 0},
            # swap is limited after memory, which it includes
            "cgroup-v1": {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes},
        }[kind]
        hard, swap = settings
        if not (folder / hard).is_file():
            raise FileNotFoundError(f"{folder} has no {hard}")
        (folder / hard).write_text(str(settings[hard]))
        if (folder / swap).is_file():  # absent where swap is not counted
            (folder / swap).write_text(str(settings[swap]))

    def command(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *command]

    def peak_bytes(self) -> int | None:
        file = self.folder / ("memory.peak" if self.kind == "cgroup-v2" else "memory.max_usage_in_bytes")
        return int(file.read_text()) if file.is_file() else None

    def kills(self) -> int:
        file = self.folder / ("memory.events" if self.kind == "cgroup-v2" else "memory.oom_control")
        counted = dict(line.split() for line in file.read_text().splitlines())
        return int(counted.get("oom_kill", 0))

    def remove(self) -> None:
        """Remove the cgroup after its processes have ended; the kernel may need a moment."""
        until = time.monotonic() + EMPTY_S
        while self.folder.is_dir():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


class DataLimit:
    """RLIMIT_DATA: allocated private writable memory, used or not; mapped files are not counted."""

    kind: Kind = "rlimit"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes

    def command(self, command: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'ulimit -d "$0" && exec "$@"', str(self._limit_bytes // 1024), *command]

    def peak_bytes(self) -> int | None:
        return None

    def kills(self) -> int:
        """Always 0: an allocation beyond the limit fails instead."""
        return 0


@contextlib.contextmanager
def limited(limit_bytes: int, mount: Path = CGROUPS) -> Iterator[MemoryLimit]:
    """The strictest limit that this machine allows. A cgroup is removed at the end: end its processes before."""
    cgroup = make_cgroup(limit_bytes, mount)
    if cgroup is None:
        yield DataLimit(limit_bytes)
        return
    try:
        yield cgroup
    finally:
        cgroup.remove()


def make_cgroup(limit_bytes: int, mount: Path = CGROUPS) -> Cgroup | None:
    """None where no cgroup can be made: no rights, no memory controller, no cgroups."""
    for parent, kind in _parents(mount):
        folder = parent / f"fleet-bench-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            return Cgroup(folder, kind, limit_bytes)
        except OSError:  # the controller is not delegated here
            folder.rmdir()
    return None


def _parents(mount: Path) -> Iterator[tuple[Path, Literal["cgroup-v2", "cgroup-v1"]]]:
    """Folders in which a memory cgroup may be made: this process's own first, since others may need more rights."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            yield mount / "memory" / own, "cgroup-v1"
        elif number == "0":  # a cgroup with processes cannot delegate a controller, so try its parents, too
            for folder in (own, *own.parents):
                yield mount / folder, "cgroup-v2"
