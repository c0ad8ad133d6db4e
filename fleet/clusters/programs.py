"""Runs a program on a node of a cluster. Its folder is copied to the node, and back every few seconds.

The program is paused (SIGSTOP) while its files are read, so a copy is consistent: it equals the folder after a kill -9
at that moment, from which the program can be resumed.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from fedvit.errors import StorageFailed
from fedvit.files import name_failure, private_files
from fleet.processes import Fleet, program

Files = dict[str, bytes]
"""Content by path below a folder, without links: the host of virtual devices makes theirs again."""

POLL_S = 0.2
REPORT_S = 1.0
"""Interval of reports without news, which show that the node is alive."""
COPY_EVERY_S = 2.0
COPY_SHARE = 0.05
"""Largest share of its time for which a program is paused for copies."""
COPY_BYTES_PER_S = 5e6
"""Average bandwidth of copies."""
LOG_BYTES = 64 << 10
"""Size of the end of a program's log in a report."""
KILLED_WITH_PARENT = signal.SIGKILL
"""A paused program reacts to no other signal."""


class ProgramJob(NamedTuple):
    """A program to run: `module`'s main, with the folders `parts` and `work` in its working directory."""

    name: str
    module: str
    arguments: tuple[str, ...]
    progress: str | None  # file in `work` that says how far it is
    software: str  # version of fedvit that must be there
    environment: dict[str, str] | None = None  # added to the node's; no other user of the node can read it


class ProgramReport(NamedTuple):
    """The state of a program on a node."""

    node: str
    progress: bytes | None = None
    log: bytes = b""
    files: Files | None = None  # of `work`, when they were copied
    code: int | None = None  # None while it runs


def pack(folder: Path) -> Files:
    """Read every file below `folder`."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def unpack(files: Files, folder: Path) -> None:
    """Replace the content of `folder` by these files; at every moment either the old or the new content exists.

    Raises StorageFailed.
    """
    new, old = (folder.with_name(f".{folder.name}.{which}") for which in ("new", "old"))
    with name_failure(f"cannot write {folder}"):
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        new.mkdir(parents=True)
        for name, content in files.items():
            path = new / name
            if not path.resolve().is_relative_to(new.resolve()):
                raise StorageFailed("FV2120", f"a node sent a file {name!r}, which is not below {folder}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def run_program(job: ProgramJob, parts: Files, work: Files, node: str) -> Iterator[ProgramReport]:
    """Run a program on this node until it ends; the last report has its exit code and its files."""
    if (here := version("fedvit")) != job.software:
        text = f"fedvit {here} is installed on node {node}, and {job.software} where this was started; install the same"
        yield ProgramReport(node, log=text.encode(), code=1)
        return
    with (
        private_files(),
        tempfile.TemporaryDirectory(prefix="fedvit-ray-", ignore_cleanup_errors=True) as folder,
        Fleet(ends_with_parent=KILLED_WITH_PARENT) as fleet,
    ):
        home = Path(folder)
        unpack(parts, home / "parts")
        unpack(work, home / "work")
        log, progress = home / "log", home / "work" / (job.progress or "no-such-file")
        process = fleet.start(job.name, [*program(job.module), *job.arguments], log, home, job.environment)
        yield ProgramReport(node, _content(progress))
        copy_at, reported_at, reported = time.monotonic() + COPY_EVERY_S, time.monotonic(), _content(progress)
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            if now >= copy_at:
                with pause(process.pid):
                    files = pack(home / "work")
                took_s = time.monotonic() - now
                size = sum(map(len, files.values()))
                copy_at = now + max(COPY_EVERY_S, took_s / COPY_SHARE, size / COPY_BYTES_PER_S)
                reported_at, reported = now, _content(progress)
                yield ProgramReport(node, reported, _end_of(log), files)
            elif (fresh := _content(progress)) != reported or now - reported_at >= REPORT_S:
                reported_at, reported = now, fresh
                yield ProgramReport(node, reported)
        yield ProgramReport(node, _content(progress), _end_of(log), pack(home / "work"), process.returncode)


@contextmanager
def pause(pid: int) -> Iterator[None]:
    """Pause a child process (SIGSTOP) inside of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # waits until the signal has arrived
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _end_of(log: Path) -> bytes:
    return log.read_bytes()[-LOG_BYTES:] if log.is_file() else b""
