"""Finds damaged files on a device: memory cards flip bits without reporting an error.

A file counts as undamaged while its size, modification time and inode are those at which this process verified it.
A flipped bit changes none of them: so every file is verified before its first use in a process and in a run, again when
that was an hour ago, and `scrub` verifies all files each hour in idle time. See
docs/decisions/0020-verify-device-files-before-use.md.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import blake3

from fedvit.blobs import ALGORITHM, BlobStore, Verified, digest_of, medium_failed
from fedvit.errors import BadPayload, Damaged

log = logging.getLogger(__name__)

SCRUB_PIECE_BYTES = 1 << 20
SCRUB_EVERY_S = 0.1
"""Interval between pieces: 10 MB/s at most, a quarter of the rate of a slow memory card."""
SCRUB_AGAIN_S = 3600.0
"""From the end of one pass over all files to the beginning of the next."""
VALID_S = 3600.0
"""For how long a file counts as verified: a device that always has a task is never idle."""
KEPT_RUNS = 32
"""Runs that are remembered: the devices of a host may take part in several."""
KEPT_REPORTS = 8
"""Findings that are stored for the next result at most; the log has all of them."""


class DamagedBlobs(Damaged):
    """Blobs did not have their digests; they are deleted, and can be fetched again."""

    def __init__(self, digests: list[str]) -> None:
        super().__init__("FV1704", f"{len(digests)} damaged blobs on this device's disk, the first is {digests[0]}")
        self.digests = digests


class Integrity:
    """Verifies the blobs of a folder. `others()` names further files to scrub, with their digests.

    Several devices of one process may share one. Findings are logged, and reported with the next result.
    """

    def __init__(self, blobs: BlobStore, others: Callable[[], Iterable[tuple[Path, str]]] = tuple) -> None:
        self.verified = Verified(VALID_S)
        self._blobs = blobs
        self._others = others
        self._found: list[str] = []
        self._lock = threading.Lock()  # tasks report in their threads
        self._begun: deque[str] = deque(maxlen=KEPT_RUNS)  # runs whose first task has verified its blobs
        self._pass: Iterator[None] | None = None
        self._due = 0.0  # on the monotonic clock

    def begin(self, run: str) -> None:
        """Verify all files anew from the first task of a run on."""
        with self._lock:
            if run in self._begun:
                return
            self._begun.append(run)
        self.verified.keep_only(())

    def check(self, digests: Iterable[str], *, afresh: bool = False) -> None:
        """Verify those of some blobs that are here; `afresh`: also if they were verified before.

        Raises DamagedBlobs for damaged ones, which are deleted.
        """
        damaged = []
        for digest in dict.fromkeys(digests):
            path = self._blobs.path(digest)
            if afresh:
                self.verified.forget(path)
            if self._blobs.has(digest) and not self.verified.is_whole(path, digest):
                self._discard(digest)
                damaged.append(digest)
        if damaged:
            raise DamagedBlobs(damaged)

    def read(self, digest: str) -> bytes:
        """The verified bytes of a small blob. Raises DamagedBlobs, and BadPayload when it is not here."""
        with contextlib.suppress(OSError):
            content = self._blobs.get(digest)
            if digest_of(content) == digest:
                return content
        self.check([digest], afresh=True)  # deletes the blob, or raises the reason why it cannot be read
        raise BadPayload("FV1704", f"blob {digest} changed while it was read")

    def report(self, what: str) -> None:
        """Log a damaged file, and report it with the next result."""
        log.error("damaged", extra={"what": what})
        with self._lock:
            if len(self._found) < KEPT_REPORTS:
                self._found.append(what[:500])

    def reports(self) -> tuple[str, ...]:
        """The findings since the last call."""
        with self._lock:
            findings, self._found = tuple(self._found), []
        return findings

    def _discard(self, digest: str) -> None:
        path = self._blobs.path(digest)
        self.verified.forget(path)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self.report(f"{path} was damaged and is deleted: it is fetched again when it is needed")

    # --- in idle time ---------------------------------------------------------------------------------

    def scrub(self) -> None:
        """Verify the next piece of a file if it is due; to be called often while the device has no task."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + SCRUB_EVERY_S
        if self._pass is None:
            self._pass = self._scrubbing()
        if next(self._pass, self) is self:
            self._pass = None
            self._due = now + SCRUB_AGAIN_S

    def _scrubbing(self) -> Iterator[None]:
        """One pass over all files; every step reads a piece at most."""
        blobs = {path: f"{ALGORITHM}:{path.name}" for path in self._blobs.folder.glob("*/*") if _is_blob(path)}
        others = dict(self._others())
        self.verified.keep_only(blobs.keys() | others.keys())
        for path, digest in [*blobs.items(), *others.items()]:
            actual = digest
            for actual in _read_slowly(path, digest):  # noqa: B007 - the last one counts
                yield
            if actual == digest:
                continue
            self.verified.forget(path)
            if path in others:
                log.error("damaged", extra={"what": f"{path} is damaged; the next task of its run repairs it"})
            elif path.is_file():
                self._discard(digest)


def _is_blob(path: Path) -> bool:
    """Not a file that is being received or written."""
    return len(path.name) == 64


def _read_slowly(path: Path, expected: str) -> Iterator[str]:
    """Yield `expected` after each piece of a file, and at its end its real digest; nothing if the file is gone."""
    hasher = blake3.blake3()
    try:
        with open(path, "rb", buffering=0) as file:
            # cached pages do not show the state of the medium
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while piece := file.read(SCRUB_PIECE_BYTES):
                hasher.update(piece)
                yield expected
    except OSError as error:
        if medium_failed(error):
            yield f"none: {error.strerror}"
        return
    yield f"{ALGORITHM}:{hasher.hexdigest()}"
