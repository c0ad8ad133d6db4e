"""The object store of a run: large blobs are put there once, and devices get signed URLs.

As a mirror (`[blobs] mirror`) it also has every blob that a resume needs.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import obstore

from coordinator.config.blobs import BlobsConfig
from coordinator.record.mirror import ABSENT, blob_object, reason_of
from coordinator.rounds.run_mirror import RunMirror
from coordinator.rounds.store_access import StoreAccess
from fedvit.blobs import BlobStore
from fedvit.transport.blob_places import Located
from fedvit.wire.messages import Manifest

log = logging.getLogger(__name__)

SLOW_S = 10.0
"""After this time a blob that is still being put is sent over MQTT, if it is small enough."""
PIECE_KEPT_S = 24 * 3600.0
"""Time for which pieces of uploads that nobody read are kept."""
UPLOADS = "uploads"


@dataclass
class _Job:
    """A blob that is being put, and the peers that wait for it."""

    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[bool, Located]] = field(default_factory=dict)


class ObjectStore:
    """A `fedvit.transport.blob_places.BlobPlaces` on S3, Google Cloud Storage or Azure."""

    def __init__(self, config: BlobsConfig, run: str, blobs: BlobStore) -> None:
        self.blobs = blobs
        self._access = StoreAccess(config, run, blobs)
        self.mirror = RunMirror(self._access)
        self.is_mirror = config.mirror
        self._config = config
        self._jobs: dict[str, _Job] = {}  # by digest
        self._excused: set[tuple[str, str]] = set()  # peer and digest: the store is why URLs failed

    @property
    def trouble(self) -> str:
        """The reason why the store cannot be used; empty if its last use succeeded."""
        return self._access.trouble

    def tick(self) -> None:
        """Try a store that nobody has used for a while. To be called often."""
        self._access.tick()

    def take_lines(self) -> list[str]:
        """Lines for the operator since the last call."""
        return self._access.take_lines()

    def close(self) -> None:
        """Finish what has begun, as far as the store answers."""
        self._access.threads.close()

    # --- what the exchange asks -------------------------------------------------------------------------

    def takes(self, manifest: Manifest) -> bool:
        return bool(self._config.origin) and manifest.size >= self._config.min_bytes

    def is_awaited(self, manifest: Manifest) -> bool:
        with self._access.lock:
            return manifest.digest in self._jobs or (bool(self._access.trouble) and not self._is_small(manifest))

    def _is_small(self, manifest: Manifest) -> bool:
        return manifest.size <= self._config.fallback_bytes

    def locate(self, peer: str, manifest: Manifest, located: Located, *, failed: bool) -> None:
        digest, chunks, url = manifest.digest, False, None
        with self._access.lock:
            if failed and (peer, digest) in self._excused:
                self._excused.discard((peer, digest))
                failed = False
            if not self._access.is_usable():
                chunks = self._is_small(manifest)
                if not chunks:
                    self._excused.add((peer, digest))
            elif digest in self._access.stored and not failed:
                url = self._access.try_to_sign("GET", blob_object(digest))
            elif job := self._jobs.get(digest):
                chunks = time.monotonic() - job.began > SLOW_S and self._is_small(manifest)
                if not chunks:
                    job.waiting[peer] = (failed, located)
            else:
                self._jobs[digest] = _Job(waiting={peer: (failed, located)})
                self._access.threads.begin(lambda: self._bring(manifest))
        if chunks or url:
            located(url)

    def upload_url(self, peer: str, manifest: Manifest, first: int) -> str | None:
        with self._access.lock:
            if not self._access.is_usable():
                return None
            return self._access.try_to_sign("PUT", _of_piece(peer, manifest.digest, first))

    def read_upload(
        self, peer: str, manifest: Manifest, first: int, size: int, read: Callable[[bytes | None], None]
    ) -> None:
        name = _of_piece(peer, manifest.digest, first)
        self._access.threads.begin(lambda: read(self._read(name, size)))

    def check(self, checked: Callable[[bool], None]) -> None:
        self._access.threads.begin(lambda: checked(self._access.probe()))

    def forget(self, digest: str) -> None:
        with self._access.lock:
            # a mirror's copy was intact when it was put
            if digest in self._access.stored and not self._config.mirror:
                self._access.stored.discard(digest)
                self._access.threads.begin(lambda: self._access.delete(blob_object(digest)))

    # --- what the run asks ------------------------------------------------------------------------------

    def prune(self, keep: set[str]) -> None:
        """Remove blobs that are not in `keep`, and pieces of uploads that nobody reads any more.

        Of a mirror, only those that this process knew when it was called: others may be those of a later leader.
        """
        with self._access.lock:
            self._excused = {(peer, digest) for peer, digest in self._excused if digest in keep}
            if self._access.trouble:
                return
            unneeded = self._access.stored - keep
            self._access.stored &= keep
            if self._config.mirror:
                self._access.removing |= unneeded
                self._access.threads.begin(lambda: self._access.remove(unneeded))
                self._access.threads.begin(lambda: self._prune(set(), UPLOADS))
            else:
                self._access.threads.begin(lambda: self._prune({blob_object(digest) for digest in keep}))

    # --- in threads -------------------------------------------------------------------------------------

    def _bring(self, manifest: Manifest) -> None:
        """Put a blob into the store unless it is there, and answer the peers that wait for it."""
        digest, trouble, url = manifest.digest, "", ""
        try:
            self._access.put_blob(digest, manifest.size)
            url = self._access.sign("GET", blob_object(digest))
        except Exception as error:  # noqa: BLE001 - of the store, whatever it is: reported
            trouble = reason_of(error)
        with self._access.lock:
            self._access.note(trouble)
            job = self._jobs.pop(digest)
            if not trouble:
                self._access.stored.add(digest)
            elif not self._is_small(manifest):
                self._excused.update((peer, digest) for peer in job.waiting)
        for failed, located in job.waiting.values():
            if not trouble:
                located(None if failed else url)  # the store works: the peer has no route to it
            elif self._is_small(manifest):
                located(None)

    def _read(self, name: str, size: int) -> bytes | None:
        """Read and remove a piece of an upload; no more than `size` bytes are read."""
        try:
            answer = obstore.get(self._access.client, name)
            found = answer.meta["size"]
            content = _content(answer, size) if found == size else None
        except ABSENT:
            return None
        except Exception as error:  # noqa: BLE001
            with self._access.lock:
                self._access.note(reason_of(error))
            return None
        if content is None:
            log.warning("piece of an upload has a wrong size", extra={"object": name, "bytes": found, "expected": size})
        self._access.delete(name)
        return content

    def _prune(self, keep: set[str], below: str | None = None) -> None:
        with contextlib.suppress(Exception):  # the next round tries again
            now = datetime.now(UTC)
            for batch in obstore.list(self._access.client, prefix=below):
                for found in batch:
                    name = found["path"]
                    young = (now - found["last_modified"]).total_seconds() < PIECE_KEPT_S
                    if name not in keep and not (name.startswith(f"{UPLOADS}/") and young):
                        self._access.delete(name)


def _content(answer: "obstore.GetResult", size: int) -> bytes | None:
    """Read an object of this size; None if it has more bytes than it announced."""
    content = bytearray()
    for piece in answer.stream():
        content += piece
        if len(content) > size:
            return None
    return bytes(content)


def _of_piece(peer: str, digest: str, first: int) -> str:
    return f"{UPLOADS}/{peer}/{digest.partition(':')[2]}-{first}"
