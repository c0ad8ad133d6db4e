"""The mirror of a run: every blob that a resume needs, in an object store.

A coordinator on another machine can continue the run: first a blob is on this disk, then in the mirror, and then the
record names it. No method is for the thread that handles messages.
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import obstore
from obstore.store import LocalStore

from coordinator.record.mirror import BLOBS, RESULTS, blob_digest, blob_object
from coordinator.rounds.store_access import StoreAccess
from fedvit.blobs import ALGORITHM
from fedvit.errors import BadPayload, StorageFailed
from fedvit.transport.urls import download
from fedvit.wire.messages import Manifest

log = logging.getLogger(__name__)


class RunMirror:
    """The mirror of one run."""

    def __init__(self, access: StoreAccess) -> None:
        self._access = access
        self._threads = access.threads

    def put(self, digests: Iterable[str]) -> None:
        """Put blobs into the mirror unless they are there, and return when all are; while the store cannot be used,
        wait. Raises DamagedBlob if one is damaged on this disk, LinkDown when the run ends meanwhile."""
        wanted = set(digests)

        def put_lacking() -> bool:
            with self._access.lock:
                lacking = wanted - self._access.stored
                free = lacking - self._access.removing
            sizes = {digest: self._access.blobs.manifest(digest).size for digest in free}
            return all(self._threads.do_all([partial(self._put, *each) for each in sizes.items()])) and free == lacking

        self._access.repeat_until_done(put_lacking)

    def fetch(self) -> None:
        """Fetch the mirror's blobs that are missing here, or damaged. Waits while the store cannot be used. Raises
        StorageFailed, DiskFull, and LinkDown when the run ends meanwhile."""

        def fetch_all() -> bool:
            [found] = self._threads.do_all([self._list_blobs])
            if found is None:
                return False
            with self._access.lock:
                self._access.stored |= found.keys()
            lacking = [digest for digest in found if not self._access.blobs.has(digest)]
            return all(self._threads.do_all([partial(self._fetch, digest, found[digest]) for digest in lacking]))

        self._access.repeat_until_done(fetch_all)

    def put_all(self) -> None:
        """Put all intact blobs of this disk into the mirror: those of a run that had no mirror, or another one."""
        here = [f"{ALGORITHM}:{file.name}" for file in self._access.blobs.folder.glob("*/*") if not file.suffix]
        self.put(digest for digest in here if self._access.blobs.has(digest))

    def put_files(self, folder: Path, names: Iterable[str]) -> None:
        """Put files of a folder into the mirror, under `results/`; as `put`."""
        jobs = [partial(self._put_file, f"{RESULTS}/{name}", folder / name) for name in names]
        self._access.repeat_until_done(lambda: all(self._threads.do_all(jobs)))

    def _put(self, digest: str, size: int) -> bool:
        """Return whether the blob is in the mirror now."""
        if not self._access.attempt(lambda: self._access.put_blob(digest, size)):
            return False
        with self._access.lock:
            self._access.stored.add(digest)
        return True

    def _put_file(self, name: str, path: Path) -> bool:
        return self._access.attempt(lambda: self._access.put_path(name, path))

    def _list_blobs(self) -> dict[str, int] | None:
        """The sizes of the blobs in the store, by digest; None if it cannot be used."""
        sizes: dict[str, int] = {}

        def look() -> None:
            for batch in obstore.list(self._access.client, prefix=BLOBS):
                for found in batch:
                    if digest := blob_digest(found["path"]):
                        sizes[digest] = found["size"]

        return sizes if self._access.attempt(look) else None

    def _fetch(self, digest: str, size: int) -> bool:
        """Fetch a blob of the mirror; False if that failed. A damaged one is removed there.

        Raises StorageFailed, DiskFull."""
        manifest = Manifest(digest, size, self._access.blobs.chunk_bytes)
        received = self._access.blobs.receive(manifest)

        index = 0

        def take(chunk: memoryview) -> bool:
            nonlocal index
            received.write(index, chunk)
            index += 1
            return True

        def bring() -> None:
            store, name = self._access.client, blob_object(digest)
            if isinstance(store, LocalStore):
                for start in range(0, size, manifest.chunk):
                    end = min(start + manifest.chunk, size)
                    take(memoryview(obstore.get_range(store, name, start=start, end=end)))
            else:
                # as devices do, since a large blob may need longer than the ANSWER_S of a request
                download(self._access.sign("GET", name), 0, size, size, manifest.chunk, take)

        try:
            if not self._access.attempt(bring):
                received.leave()
                return False
            received.commit()
        except BadPayload as error:
            received.abandon()
            log.error("damaged object", extra={"object": blob_object(digest), "reason": str(error)})
            self._access.remove({digest})
        except StorageFailed:
            received.leave()
            raise
        return True
