"""Partially received blobs: files with which a process continues after a kill or a power cut.

Beside a blob's final path are `HASH.part`, its bytes, and `HASH.map`, which of them are here. The map is
shared memory, so that a process may end at any moment without losing its notes. After a power cut the kernel may
have written the map but not the bytes, so that only chunks count that were noted after a sync. The id of the
boot shows which case it is.
"""

import contextlib
import fcntl
import mmap
import os
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import blake3

from fedvit.errors import BadPayload
from fedvit.files import make_folder, name_failure, sync_folder
from fedvit.wire.messages import Manifest

SYNC_BYTES = 4 * 1024 * 1024
"""Bytes between syncs: at most this much is lost by a power cut."""
_READ_BYTES = 1 << 20
PART, MAP = ".part", ".map"
_HEADER = struct.Struct(">4sIQ36s")  # magic, chunk, size, boot; then one byte a chunk: here, and again: on disk
_MAGIC = b"fvm1"
_syncer = ThreadPoolExecutor(1, thread_name_prefix="blob-sync")  # its thread starts with the first big blob


def boot_id() -> bytes:
    """The id of this boot; empty if the system has none, which counts as a power cut before each start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]
    except OSError:
        return b""


class PartialBlob:
    """One blob that is being received. A second receiver in the same folder gets a temporary file of its own.

    Raises StorageFailed when the folder cannot be written.
    """

    def __init__(self, final: Path, manifest: Manifest) -> None:
        self._final = final
        self._manifest = manifest
        with name_failure(f"cannot receive into {final}"):
            make_folder(final.parent)
            self._open()
        self._hasher = blake3.blake3()
        self._hashed = 0  # chunks from the first on that were hashed as they came
        self._unsynced_bytes = 0
        self._sync: Future[None] | None = None

    @property
    def have(self) -> bytes:
        """One byte for each chunk: whether it is here."""
        return self._map[_HEADER.size : _HEADER.size + self._manifest.chunks]

    def write(self, index: int, payload: bytes | memoryview) -> None:
        """Store one chunk. Raises DiskFull when the disk is full."""
        start = index * self._manifest.chunk
        with name_failure(f"cannot write {len(payload)} bytes to {self._path}"):
            _write_all(self._file, payload, start)
        if index == self._hashed:
            self._hasher.update(payload)
            self._hashed += 1
        elif index < self._hashed:
            self._hash_again()
        self._map[_HEADER.size + index] = 1
        self._unsynced_bytes += len(payload)
        if self._unsynced_bytes >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            self._unsynced_bytes = 0
            self._sync = _syncer.submit(self._note_synced)

    def restart(self) -> None:
        """Discard all chunks."""
        self._await_sync()
        self._map[_HEADER.size :] = bytes(len(self._map) - _HEADER.size)
        self._hash_again()

    def commit(self) -> None:
        """Verify the blob and move it to its final path. Raises BadPayload for a wrong digest."""
        self._await_sync()
        os.fsync(self._file)
        found = self._digest()
        expected = self._manifest.digest
        if found != expected:
            raise BadPayload("FV1704", f"blob of {self._manifest.size} bytes has digest {found}, expected {expected}")
        os.replace(self._path, self._final)
        self._map_path.unlink(missing_ok=True)
        sync_folder(self._final.parent)
        self._close()

    def abandon(self) -> None:
        """Delete the file; it stays on a disk that can only be read, as one that has failed."""
        for path in (self._path, self._map_path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._close()

    def leave(self) -> None:
        """Stop for now; the next receiver of this blob continues from here."""
        if self._private or not any(self.have):
            self.abandon()
        else:
            self._close()

    # --- files ----------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._path, self._private = self._final.with_name(self._final.name + PART), False
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(self._file, self._path):
            os.close(self._file)
            name = f"{self._final.name}.{os.getpid()}.{id(self):x}{PART}"
            self._path, self._private = self._final.with_name(name), True
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            _lock(self._file, self._path)
        self._map_path = self._path.with_suffix(MAP)
        try:
            self._map = self._open_map()
        except OSError:
            os.close(self._file)
            raise

    def _open_map(self) -> mmap.mmap:
        """The map of an earlier attempt, if it belongs to this blob and is valid; else an empty one."""
        chunks, boot = self._manifest.chunks, boot_id()
        head = _HEADER.pack(_MAGIC, self._manifest.chunk, self._manifest.size, boot)
        handle = os.open(self._map_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            old = os.pread(handle, _HEADER.size + 2 * chunks, 0)
            here = synced = bytes(chunks)
            if (
                len(old) == len(head) + 2 * chunks
                and old[: len(head) - 36] == head[:-36]
                and os.fstat(self._file).st_size
            ):
                here, synced = old[len(head) : len(head) + chunks], old[len(head) + chunks :]
                if not boot or old[len(head) - 36 : len(head)] != boot.ljust(36, b"\0"):
                    here = synced
            # written, since on a full disk an access to a page that is missing ends the process
            _write_all(handle, head + here + synced, 0)
            os.ftruncate(handle, len(head) + 2 * chunks)
            if not any(here):
                os.ftruncate(self._file, 0)
            return mmap.mmap(handle, _HEADER.size + 2 * chunks)
        finally:
            os.close(handle)

    def _note_synced(self) -> None:
        """Runs in the syncing thread: sync the current chunks, and note them as durable."""
        here = self.have
        with contextlib.suppress(OSError):  # commit fails in the same way, and reports it
            os.fdatasync(self._file)
            self._map[_HEADER.size + len(here) :] = here

    def _await_sync(self) -> None:
        if self._sync is not None:
            self._sync.result()
            self._sync = None

    def _close(self) -> None:
        self._await_sync()
        self._map.close()
        os.close(self._file)

    # --- digest ---------------------------------------------------------------------------------------

    def _digest(self) -> str:
        """The digest of the file; chunks that came in order were hashed already.

        The rest is read, not mapped: on a defective medium a mapped page ends the process.
        """
        hasher = self._hasher.copy()
        at = self._hashed * self._manifest.chunk
        while piece := os.pread(self._file, _READ_BYTES, at):
            hasher.update(piece)
            at += len(piece)
        return f"blake3:{hasher.hexdigest()}"

    def _hash_again(self) -> None:
        self._hasher = blake3.blake3()
        self._hashed = 0


def _write_all(handle: int, content: bytes | memoryview, start: int) -> None:
    """Write all of it: on a disk that is almost full a write may be cut. Raises OSError."""
    written = 0
    while written < len(content):
        written += os.pwrite(handle, content[written:], start + written)


def _lock(handle: int, path: Path) -> bool:
    """Lock the file; False if another process has it, or it was replaced."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(handle).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def in_use(path: Path) -> bool:
    """Return whether a process receives into this `.part` file now."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock(handle, path)
    finally:
        os.close(handle)
