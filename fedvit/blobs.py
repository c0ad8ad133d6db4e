"""Content-addressed bytes on disk: programs, graphs, weights, deltas, features.

A blob's name is its digest, `blake3:HEX`; the algorithm is part of the name. Nothing under its final
name is ever incomplete or altered: bytes are verified, synced and renamed into place.
"""

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3

from fedvit.errors import BadPayload
from fedvit.files import FileGroup, atomic_write, storage_failed
from fedvit.partials import MAP, PART, PartialBlob, in_use
from fedvit.wire.messages import Manifest
from fedvit.wire.transfer import CHUNK_BYTES

ALGORITHM = "blake3"
_PIECE_BYTES = 1 << 20
_MEDIUM = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What the system says when a medium or a file system no longer gives what was written to it."""


def digest_of(*pieces: bytes | memoryview) -> str:
    hasher = blake3.blake3()
    for piece in pieces:
        hasher.update(piece)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def digest_of_file(path: Path) -> str:
    """Read, and not mapped: where a medium fails, a read raises OSError, and a page that is mapped ends the process."""
    hasher = blake3.blake3()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def medium_failed(error: OSError) -> bool:
    """Whether an error says something of the file, and not of this process: its bytes cannot be had any more."""
    return error.errno in _MEDIUM


def is_whole(path: Path, digest: str) -> bool:
    """Whether a file is there and has this digest; also False where the medium cannot give its bytes any more.

    All of it is read. Raises StorageFailed when that is not possible for another reason (no permission, too many open
    files), which says nothing of the file.
    """
    try:
        return digest_of_file(path) == digest
    except FileNotFoundError:
        return False
    except OSError as error:
        if medium_failed(error):
            return False
        raise storage_failed(f"cannot read {path}", error) from error


class BlobStore:
    """A folder of blobs. Any number of processes may share it: writes are atomic and equal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where the blob lies or would lie. Raises BadPayload for anything that is no digest of ours."""
        algorithm, _, name = digest.partition(":")
        if algorithm != ALGORITHM or len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise BadPayload(f"{digest!r} is no {ALGORITHM} digest")
        return self.folder / name[:2] / name

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def keeps(self, digest: str) -> bool:
        """Whether the blob is here because its owner had it; in a folder that several share, `has` says less."""
        return self.has(digest)

    def put(self, *pieces: bytes | memoryview) -> Manifest:
        """Keep the pieces as one blob. Raises DiskFull when the disk is full."""
        digest = digest_of(*pieces)
        if not self.has(digest):
            atomic_write(self.path(digest), *pieces)
        return Manifest(digest, sum(map(len, pieces)), CHUNK_BYTES)

    def manifest(self, digest: str) -> Manifest:
        """What a receiver must know of a blob. Raises BadPayload when it is not here."""
        try:
            return Manifest(digest, self.path(digest).stat().st_size, CHUNK_BYTES)
        except FileNotFoundError:
            raise BadPayload(f"blob {digest} is not in {self.folder}") from None

    def get(self, digest: str) -> bytes:
        """The blob's bytes. Raises BadPayload when it is not here."""
        try:
            return self.path(digest).read_bytes()
        except FileNotFoundError:
            raise BadPayload(f"blob {digest} is not in {self.folder}") from None

    def verify(self, digest: str) -> bool:
        """Whether the blob is here and whole: all of it is read. Changes nothing; who calls it decides what follows.

        Raises BadPayload for anything that is no digest of ours, StorageFailed as `is_whole`.
        """
        return is_whole(self.path(digest), digest)

    def small(self, digests: Iterable[str], limit_bytes: int) -> tuple[bytes, ...]:
        """The smallest of some blobs, as many as together have no more than `limit_bytes`; at most 100 of them."""
        chosen = []
        by_size = sorted(map(self.manifest, set(digests)), key=lambda manifest: (manifest.size, manifest.digest))
        for manifest in by_size[:100]:
            limit_bytes -= manifest.size
            if limit_bytes < 0:
                break
            chosen.append(self.get(manifest.digest))
        return tuple(chosen)

    def prune(self, keep: set[str], partial_kept_s: float = 0.0) -> int:
        """Delete every blob, also half-received ones, that is not in `keep`; returns how many bytes that freed.

        Not what is being received into now, nor what was half-received within the last `partial_kept_s` seconds.
        """
        freed = 0
        for file, size in self.prunable(keep, partial_kept_s):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                file.unlink()
                freed += size
        return freed

    def prunable(self, keep: set[str], partial_kept_s: float = 0.0) -> Iterator[tuple[Path, int]]:
        """The files that `prune` deletes, each with the bytes that this frees."""
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
        """Begin to receive a blob piece by piece, or go on with it. Raises StorageFailed."""
        return PartialBlob(self.path(manifest.digest), manifest)

    @contextlib.contextmanager
    def gathering(self) -> "Iterator[Gathering]":
        """Keep many blobs at once, which is much faster than one by one: they are here when the block ends.

        Nothing of them is, when it raises. Raises DiskFull when the disk is full.
        """
        gathering = Gathering(self)
        try:
            yield gathering
            gathering.commit()
        finally:
            gathering.abandon()


class Gathering(BlobStore):
    """A store, and the blobs that are just being put into it; for one thread."""

    def __init__(self, store: BlobStore) -> None:
        super().__init__(store.folder)
        self._store = store
        self._files = FileGroup()
        self._fresh: dict[str, Manifest] = {}

    def has(self, digest: str) -> bool:
        return digest in self._fresh or self._store.has(digest)

    def manifest(self, digest: str) -> Manifest:
        return self._fresh.get(digest) or self._store.manifest(digest)

    def get(self, digest: str) -> bytes:
        """Only of what is committed."""
        return self._store.get(digest)

    def put(self, *pieces: bytes | memoryview) -> Manifest:
        digest = digest_of(*pieces)
        manifest = Manifest(digest, sum(map(len, pieces)), CHUNK_BYTES)
        if not self.has(digest):
            self._files.write(self.path(digest), *pieces)
            self._fresh[digest] = manifest
        return manifest

    def commit(self) -> None:
        self._files.commit()
        self._fresh.clear()

    def abandon(self) -> None:
        """What is not committed is not kept."""
        self._files.abandon()
        self._fresh.clear()
