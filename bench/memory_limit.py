"""A hard limit on the memory of a process: a memory cgroup where the machine allows one, else an rlimit."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

Kind = Literal["cgroup-v2", "cgroup-v1", "rlimit"]
CGROUPS = Path("/sys/fs/cgroup")
EMPTY_S = 5.0
FILES: dict[Kind, dict[str, str]] = {
    "cgroup-v2": {
        "limit": "memory.max", "swap": "memory.swap.max", "peak": "memory.peak", "kills": "memory.events",
    },
    "cgroup-v1": {
        "limit": "memory.limit_in_bytes", "swap": "memory.memsw.limit_in_bytes", "peak": "memory.max_usage_in_bytes",
        "kills": "memory.oom_control",
    },
}  # fmt: skip


class MemoryLimit(Struct, frozen=True):
    """A limit: the cgroup in `folder`, or RLIMIT_DATA, which counts private writable memory and no mapped files."""

    kind: Kind
    limit_bytes: int
    folder: Path = CGROUPS

    def command(self, command: Sequence[str]) -> list[str]:
        """Make a command line that starts under the limit."""
        if self.kind == "rlimit":
            return ["sh", "-c", 'ulimit -d "$0" && exec "$@"', str(self.limit_bytes // 1024), *command]
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.folder), *command]

    def peak_bytes(self) -> int | None:
        """Read the peak as the cgroup counts it; None where nothing counts."""
        text = self._read("peak")
        return int(text) if text else None

    def kills(self) -> int:
        """Count the processes that the kernel killed; 0 under an rlimit, where an allocation fails instead."""
        return int(dict(line.split() for line in self._read("kills").splitlines()).get("oom_kill", 0))

    def write(self) -> None:
        """Set the limit of the cgroup. Raises OSError where it has no memory controller."""
        files = FILES[self.kind]
        if not (self.folder / files["limit"]).is_file():
            raise FileNotFoundError(f"{self.folder} has no {files['limit']}")
        (self.folder / files["limit"]).write_text(str(self.limit_bytes))
        swap = self.folder / files["swap"]
        if swap.is_file():  # absent where swap is not counted; v1 counts memory in it
            swap.write_text(str(0 if self.kind == "cgroup-v2" else self.limit_bytes))

    def _read(self, name: str) -> str:
        file = self.folder / FILES.get(self.kind, {}).get(name, "none")
        return file.read_text() if file.is_file() else ""


@contextlib.contextmanager
def limit_memory(limit_bytes: int, mount: Path = CGROUPS) -> Iterator[MemoryLimit]:
    """Yield the strictest limit that this machine allows. Its processes must have ended at the end."""
    for folder, kind in _list_candidates(mount):
        try:
            folder.mkdir()
        except OSError:
            continue
        limit = MemoryLimit(kind, limit_bytes, folder)
        try:
            limit.write()
        except OSError:  # the controller is not delegated here
            folder.rmdir()
            continue
        try:
            yield limit
        finally:
            _remove(folder)
        return
    yield MemoryLimit("rlimit", limit_bytes)


def _list_candidates(mount: Path) -> Iterator[tuple[Path, Kind]]:
    """List where a cgroup may be made: this process's own cgroup first, since others may need more rights."""
    name = f"fleet-bench-{os.getpid()}"
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        if "memory" in controllers.split(","):
            yield mount / "memory" / own / name, "cgroup-v1"
        elif number == "0":  # a cgroup with processes cannot delegate a controller, so try its parents, too
            for folder in (own, *own.parents):
                yield mount / folder / name, "cgroup-v2"


def _remove(folder: Path) -> None:
    """Remove a cgroup; the kernel may need a moment after the end of its processes."""
    until = time.monotonic() + EMPTY_S
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
