"""Content-addressed bytes on disk: programs, graphs, weights, deltas, features.

A blob's name is its digest, `blake3:HEX`; the algorithm is part of the name. A file
with a final name is complete: bytes are verified, synced and renamed into place.
"""

import contextlib
import errno
import functools
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import blake3

from fedvit.errors import BadPayload
from fedvit.files import FileGroup, atomic_write, storage_failed
from fedvit.partials import MAP, PART, PartialBlob, in_use
from fedvit.wire.messages import Manifest
from fedvit.wire.transfer import CHUNK_BYTES

ALGORITHM = "blake3"
_PIECE_BYTES = 1 << 20
_MEDIUM = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""Errors of the system for a defective medium or file system."""


def digest_of(*pieces: bytes | memoryview) -> str:
    hasher = blake3.blake3()
    for piece in pieces:
        hasher.update(piece)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def digest_of_file(path: Path) -> str:
    """Reads instead of mapping: on a defective medium a read raises OSError, a mapped page kills the process."""
    hasher = blake3.blake3()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def medium_failed(error: OSError) -> bool:
    """Return whether an error is due to the medium: the file's bytes can no longer be read."""
    return error.errno in _MEDIUM


def is_whole(path: Path, digest: str) -> bool:
    """Return whether a file exists and has this digest; also False if the medium cannot read it.

    Reads the whole file. Raises StorageFailed if that fails for another reason (no permission, too many open files),
    which does not show damage.
    """
    try:
        return digest_of_file(path) == digest
    except FileNotFoundError:
        return False
    except OSError as error:
        if medium_failed(error):
            return False
        raise storage_failed(f"cannot read {path}", error) from error


class _Stamp(NamedTuple):
    digest: str
    size: int
    mtime_ns: int
    inode: int


class Verified:
    """The files that this process has checked. Safe from any thread.

    A file counts as whole while its size, modification time and inode are those at which it was read, for `valid_s` at
    most: a flipped bit changes none of them.
    """

    def __init__(self, valid_s: float = math.inf) -> None:
        self._valid_s = valid_s
        self._stamps: dict[Path, tuple[_Stamp, float]] = {}  # with the time of reading, on the monotonic clock

    def is_whole(self, path: Path, digest: str) -> bool:
        """Do the same as the function `is_whole`, without reading a file again that looks the same."""
        stamp = _stamp(path, digest)
        now = time.monotonic()
        known, read_at = self._stamps.get(path, (None, now))
        if stamp is not None and known == stamp and now - read_at < self._valid_s:
            return True
        self.forget(path)
        whole = is_whole(path, digest)
        if whole and stamp is not None:
            self._stamps[path] = stamp, now
        return whole

    def forget(self, path: Path) -> None:
        """Forget that a file is whole: the next check reads it again."""
        self._stamps.pop(path, None)

    def keep_only(self, paths: Iterable[Path]) -> None:
        kept = set(paths)
        for path in list(self._stamps):
            if path not in kept:
                self.forget(path)


def _stamp(path: Path, digest: str) -> _Stamp | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return _Stamp(digest, state.st_size, state.st_mtime_ns, state.st_ino)


@functools.lru_cache(maxsize=1024)  # a round asks for the path of a blob 20 times, which takes longer than a stat
def _find_path(folder: Path, digest: str) -> Path:
    algorithm, _, name = digest.partition(":")
    if algorithm != ALGORITHM or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise BadPayload("FV2302", f"{digest!r} is not a {ALGORITHM} digest")
    return folder / name[:2] / name


class BlobStore:
    """A folder of blobs. Any number of processes may share it: writes are atomic and equal.

    `chunk_bytes` is the size of chunks in its manifests.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """The path of a blob, existing or not. Raises BadPayload for an invalid digest."""
        return _find_path(self.folder, digest)

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def bytes_here(self, digest: str) -> int:
        """Return the size of a blob's file, complete or not; 0 if there is none."""
        path = self.path(digest)
        for file in (path, path.with_name(path.name + PART)):
            with contextlib.suppress(FileNotFoundError):
                return file.stat().st_size
        return 0

    def keeps(self, digest: str) -> bool:
        """Return whether this store's owner put the blob; in a shared folder `has` does not show that."""
        return self.has(digest)

    def put(self, *pieces: bytes | memoryview) -> Manifest:
        """Store the pieces as one blob. Raises DiskFull when the disk is full."""
        digest = digest_of(*pieces)
        if not self.has(digest):
            atomic_write(self.path(digest), *pieces)
        return Manifest(digest, sum(map(len, pieces)), self.chunk_bytes)

    def manifest(self, digest: str) -> Manifest:
        """Return the size and digest that a receiver needs. Raises BadPayload if the store lacks the blob."""
        try:
            return Manifest(digest, self.path(digest).stat().st_size, self.chunk_bytes)
        except FileNotFoundError:
            raise BadPayload("FV1706", f"blob {digest} is not in {self.folder}") from None

    def get(self, digest: str) -> bytes:
        """The blob's bytes. Raises BadPayload when it is not here."""
        try:
            return self.path(digest).read_bytes()
        except FileNotFoundError:
            raise BadPayload("FV1706", f"blob {digest} is not in {self.folder}") from None

    def small(self, digests: Iterable[str], limit_bytes: int) -> tuple[bytes, ...]:
        """The smallest of some blobs, with at most `limit_bytes` together; at most 100 of them."""
        chosen = []
        by_size = sorted(map(self.manifest, set(digests)), key=lambda manifest: (manifest.size, manifest.digest))
        for manifest in by_size[:100]:
            limit_bytes -= manifest.size
            if limit_bytes < 0:
                break
            chosen.append(self.get(manifest.digest))
        return tuple(chosen)

    def prune(self, keep: set[str], partial_kept_s: float = 0.0) -> int:
        """Delete every blob, also half-received ones, that is not in `keep`; returns the number of freed bytes.

        Blobs that are being received, or were within the last `partial_kept_s` seconds, are kept.
        """
        return self.delete(self.prunable(keep, partial_kept_s))

    @staticmethod
    def delete(files: Iterable[tuple[Path, int]]) -> int:
        """Delete files, each given with its number of bytes; returns the number of freed bytes."""
        freed = 0
        for file, size in files:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                file.unlink()
                freed += size
        return freed

    def prunable(self, keep: set[str], partial_kept_s: float = 0.0) -> Iterator[tuple[Path, int]]:
        """The files that `prune` deletes, each with its number of bytes."""
        blobs = {self.path(digest) for digest in keep}
        kept = {path.with_name(path.name + suffix) for path in blobs for suffix in ("", PART, MAP)}
        for file in set(self.folder.glob("*/*")) - kept:
            with contextlib.suppress(FileNotFoundError):
                state = file.stat()
                young = time.time() - state.st_mtime < partial_kept_s
                if file.suffix in (PART, MAP) and (young or in_use(file.with_suffix(PART))):
                    continue
                yield file, state.st_size if file.suffix != MAP else 0

    def receive(self, manifest: Manifest) -> PartialBlob:
        """Start to receive a blob piece by piece, or continue. Raises StorageFailed."""
        return PartialBlob(self.path(manifest.digest), manifest)

    @contextlib.contextmanager
    def commit_together(self) -> "Iterator[BatchedCommit]":
        """Store many blobs together: they are durable when the block ends. One by one, syncs took a third of the time
        of a round of 500 devices.

        After an exception none of them is stored. Raises DiskFull when the disk is full.
        """
        batched_commit = BatchedCommit(self)
        try:
            yield batched_commit
            batched_commit.commit()
        finally:
            batched_commit.abandon()


class BatchedCommit(BlobStore):
    """A store, and new blobs that are not committed yet; for one thread."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store.folder)
        self.chunk_bytes = store.chunk_bytes
        self._store = store
        self._files = FileGroup()
        self._fresh: dict[str, Manifest] = {}

    def has(self, digest: str) -> bool:
        return digest in self._fresh or self._store.has(digest)

    def manifest(self, digest: str) -> Manifest:
        return self._fresh.get(digest) or self._store.manifest(digest)

    def get(self, digest: str) -> bytes:
        """The bytes of a committed blob."""
        return self._store.get(digest)

    def put(self, *pieces: bytes | memoryview) -> Manifest:
        digest = digest_of(*pieces)
        manifest = Manifest(digest, sum(map(len, pieces)), self.chunk_bytes)
        if not self.has(digest):
            self._files.write(self.path(digest), *pieces)
            self._fresh[digest] = manifest
        return manifest

    def commit(self) -> None:
        self._files.commit()
        self._fresh.clear()

    def abandon(self) -> None:
        """Discard the blobs that are not committed."""
        self._files.abandon()
        self._fresh.clear()
