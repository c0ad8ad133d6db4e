"""A program on a node of a cluster, and its folder, which travels: there at the beginning, back every few seconds.

What comes back is what lay in the folder at one moment: the program is stopped (SIGSTOP) while its files are read. So
a folder that came back is what a kill -9 at that moment would have left, from which every program here can go on.
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
from fedvit.files import private_files, storage_failed
from fleet.processes import Fleet, program

Files = dict[str, bytes]
"""Content by path below a folder. Links are left out: those of virtual devices are made anew by their host."""

POLL_S = 0.2
REPORT_S = 1.0
"""A program that has nothing new to report does so all the same, so that its node is known to be there."""
COPY_EVERY_S = 2.0
COPY_SHARE = 0.05
"""Of its time a program is stopped for copies, at most."""
COPY_BYTES_PER_S = 5e6
"""Of the network that copies take, on average."""
LOG_BYTES = 64 << 10
"""Of the end of a program's log, that is reported."""
KILLED_WITH_PARENT = signal.SIGKILL
"""A program that is stopped hears of no other signal."""


class Order(NamedTuple):
    """What to run: `module`'s main, with `parts` and `work` of the current folder as its folders."""

    name: str
    module: str
    arguments: tuple[str, ...]
    progress: str | None  # file in `work` that says how far it is
    software: str  # version of fedvit that must be there
    environment: dict[str, str] | None = None  # added to the node's; no other user of the node can read it


class Report(NamedTuple):
    """What a program on a node has come to."""

    node: str
    progress: bytes | None = None
    log: bytes = b""
    files: Files | None = None  # of `work`, when they were copied
    code: int | None = None  # None while it runs


def pack(folder: Path) -> Files:
    """Every file below `folder`."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def unpack(files: Files, folder: Path) -> None:
    """Make `folder` hold these files and nothing else; there is always either the old content or the new.

    Raises StorageFailed.
    """
    new, old = (folder.with_name(f".{folder.name}.{which}") for which in ("new", "old"))
    try:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        new.mkdir(parents=True)
        for name, content in files.items():
            path = new / name
            if not path.resolve().is_relative_to(new.resolve()):
                raise StorageFailed(f"a node sent a file {name!r}, which is not below {folder}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise storage_failed(f"cannot write {folder}", error) from error


def run_program(order: Order, parts: Files, work: Files, node: str) -> Iterator[Report]:
    """Run a program on this node until it ends; what it reports last has its exit code and its files."""
    if (here := version("fedvit")) != order.software:
        text = (
            f"fedvit {here} is installed on node {node}, and {order.software} where this was started; install the same"
        )
        yield Report(node, log=text.encode(), code=1)
        return
    with (
        private_files(),
        tempfile.TemporaryDirectory(prefix="fedvit-ray-", ignore_cleanup_errors=True) as folder,
        Fleet(ends_with_parent=KILLED_WITH_PARENT) as fleet,
    ):
        home = Path(folder)
        unpack(parts, home / "parts")
        unpack(work, home / "work")
        log, progress = home / "log", home / "work" / (order.progress or "no-such-file")
        process = fleet.start(order.name, [*program(order.module), *order.arguments], log, home, order.environment)
        yield Report(node, _content(progress))
        copy_at, said_at, said = time.monotonic() + COPY_EVERY_S, time.monotonic(), _content(progress)
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            if now >= copy_at:
                with stopped(process.pid):
                    files = pack(home / "work")
                took_s = time.monotonic() - now
                size = sum(map(len, files.values()))
                copy_at = now + max(COPY_EVERY_S, took_s / COPY_SHARE, size / COPY_BYTES_PER_S)
                said_at, said = now, _content(progress)
                yield Report(node, said, _end_of(log), files)
            elif (fresh := _content(progress)) != said or now - said_at >= REPORT_S:
                said_at, said = now, fresh
                yield Report(node, said)
        yield Report(node, _content(progress), _end_of(log), pack(home / "work"), process.returncode)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Within it the process, a child of ours, does nothing; where it has ended, that is so anyway."""
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a signal arrives some time later
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _end_of(log: Path) -> bytes:
    return log.read_bytes()[-LOG_BYTES:] if log.is_file() else b""
