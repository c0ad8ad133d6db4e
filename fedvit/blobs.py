"""Content-addressed bytes on disk: programs, graphs, weights, deltas, features.

A blob's name is its digest, `blake3:HEX`; the algorithm is part of the name. Nothing under its final
name is ever incomplete or altered: bytes are verified, synced and renamed into place.
"""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

import blake3

from fedvit.errors import BadPayload
from fedvit.files import atomic_write, make_folder, storage_failed, sync_folder
from fedvit.wire.messages import Manifest
from fedvit.wire.transfer import CHUNK_BYTES

ALGORITHM = "blake3"


def digest_of(*pieces: bytes | memoryview) -> str:
    hasher = blake3.blake3()
    for piece in pieces:
        hasher.update(piece)
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def digest_of_file(path: Path) -> str:
    return f"{ALGORITHM}:{blake3.blake3().update_mmap(path).hexdigest()}"


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

    def prune(self, keep: set[str]) -> int:
        """Delete every blob, also half-received ones, that is not in `keep`; returns how many bytes that freed."""
        freed = 0
        kept = {self.path(digest) for digest in keep}
        for file in self.folder.glob("*/*"):
            if file not in kept:
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    size = file.stat().st_size
                    file.unlink()
                    freed += size
        return freed

    def receive(self, manifest: Manifest) -> "PartialBlob":
        """Begin to receive a blob piece by piece."""
        return PartialBlob(self, manifest)


class PartialBlob:
    """A blob under construction, in a file beside its final place."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        self._final = store.path(manifest.digest)
        self._manifest = manifest
        self._path = self._final.with_name(f"{self._final.name}.{os.getpid()}.{id(self):x}.part")
        try:
            make_folder(self._path.parent)
            self._file: BinaryIO = open(self._path, "w+b", buffering=0)  # noqa: SIM115 - closed by commit or abandon
        except OSError as error:
            raise storage_failed(f"cannot receive into {self._path}", error) from error

    def write(self, index: int, payload: bytes) -> None:
        """Keep one chunk. Raises DiskFull when the disk is full."""
        try:
            written = 0
            while written < len(payload):  # on a disk that is almost full a write may be cut
                written += os.pwrite(self._file.fileno(), payload[written:], index * self._manifest.chunk + written)
        except OSError as error:
            raise storage_failed(f"cannot write {len(payload)} bytes to {self._path}", error) from error

    def commit(self) -> None:
        """Verify the whole and give it its name. Raises BadPayload when the digest is another one."""
        os.fsync(self._file.fileno())
        found = digest_of_file(self._path)
        if found != self._manifest.digest:
            expected = self._manifest.digest
            raise BadPayload(f"blob of {self._manifest.size} bytes has digest {found}, expected {expected}")
        self._file.close()
        os.replace(self._path, self._final)
        sync_folder(self._final.parent)

    def abandon(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
