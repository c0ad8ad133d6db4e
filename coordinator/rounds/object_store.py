"""The object store of a run: large blobs are put there once, and devices get signed URLs.

As a mirror (`[blobs] mirror`) it also has every blob that a resume needs, so that a coordinator on another machine can
continue the run: first a blob is on this disk, then in the mirror, and then the record names it.

All calls to the store are made by threads of this module. The coordinator's keys come from the environment, as for
other programs (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_KEY), and
never reach the record, a log or a device.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeVar

import obstore
from obstore.store import LocalStore

from coordinator.config.blobs import BlobsConfig
from coordinator.record.mirror import (
    ABSENT,
    BLOBS,
    RESULTS,
    ObjectStoreClient,
    blob_digest,
    blob_object,
    check_folder,
    open_store,
    reason_of,
)
from fedvit.blobs import ALGORITHM, BlobStore
from fedvit.errors import BadPayload, FedvitError, LinkDown, StorageFailed
from fedvit.transport.blob_places import Located
from fedvit.transport.urls import download
from fedvit.wire.messages import Manifest

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

THREADS = 4
SLOW_S = 10.0
"""After this time a blob that is still being put is sent over MQTT, if it is small enough."""
RETRY_S = 5.0
"""How often a store in trouble is tried again."""
PART_BYTES = 16 << 20
"""Of a large blob that is put; the store takes one part after the other."""
PIECE_KEPT_S = 24 * 3600.0
"""How long pieces of uploads that nobody read are kept."""
CLOSE_S = 10.0
ENDED_CHECK_S = 0.2
"""How often a thread that waits for the mirror looks whether the run has ended."""
PROBE = "probe"
UPLOADS = "uploads"


@dataclass
class _Job:
    """A blob that is being put, and the peers that wait for it."""

    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[bool, Located]] = field(default_factory=dict)


class ObjectStore:
    """A `fedvit.transport.blob_places.BlobPlaces` on S3, Google Cloud Storage or Azure. Objects of a run are below
    PREFIX/RUN."""

    def __init__(self, config: BlobsConfig, run: str, blobs: BlobStore) -> None:
        assert config.url is not None  # checked by the caller
        self._config = config
        self.blobs = blobs
        self._valid = timedelta(seconds=config.url_valid_s)
        self._name = run
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._trouble = ""  # why the store cannot be used
        self._tried_at = 0.0
        self._stored: set[str] = set()
        self._removing: set[str] = set()  # from the mirror
        self._closed = threading.Event()
        self._jobs: dict[str, _Job] = {}  # by digest
        self._excused: set[tuple[str, str]] = set()  # peer and digest: the store is why URLs failed
        self._lines: list[str] = []

    def take_lines(self) -> list[str]:
        """Lines for the operator since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    @property
    def _store(self) -> ObjectStoreClient:
        check_folder(self._config)
        return self._opened

    @cached_property
    def _opened(self) -> ObjectStoreClient:
        """Made when it is first used, so that keys that cannot be read are reported as other trouble of the store."""
        return open_store(self._config, self._name)

    # --- what the exchange asks -------------------------------------------------------------------------

    def takes(self, manifest: Manifest) -> bool:
        return bool(self._config.origin) and manifest.size >= self._config.min_bytes

    def is_awaited(self, manifest: Manifest) -> bool:
        with self._lock:
            return manifest.digest in self._jobs or (bool(self._trouble) and not self._is_small(manifest))

    def _is_small(self, manifest: Manifest) -> bool:
        return manifest.size <= self._config.fallback_bytes

    def locate(self, peer: str, manifest: Manifest, located: Located, *, failed: bool) -> None:
        digest, chunks, url = manifest.digest, False, None
        with self._lock:
            if failed and (peer, digest) in self._excused:
                self._excused.discard((peer, digest))
                failed = False
            if not self._is_usable():
                chunks = self._is_small(manifest)
                if not chunks:
                    self._excused.add((peer, digest))
            elif digest in self._stored and not failed:
                url = self._signed("GET", blob_object(digest))
            elif job := self._jobs.get(digest):
                chunks = time.monotonic() - job.began > SLOW_S and self._is_small(manifest)
                if not chunks:
                    job.waiting[peer] = (failed, located)
            else:
                self._jobs[digest] = _Job(waiting={peer: (failed, located)})
                self._begin(lambda: self._bring(manifest))
        if chunks or url:
            located(url)

    def upload_url(self, peer: str, manifest: Manifest, first: int) -> str | None:
        with self._lock:
            return self._signed("PUT", _of_piece(peer, manifest.digest, first)) if self._is_usable() else None

    def read_upload(
        self, peer: str, manifest: Manifest, first: int, size: int, read: Callable[[bytes | None], None]
    ) -> None:
        name = _of_piece(peer, manifest.digest, first)
        with self._lock:
            self._begin(lambda: read(self._read(name, size)))

    def check(self, checked: Callable[[bool], None]) -> None:
        with self._lock:
            self._begin(lambda: checked(self._try()))

    def forget(self, digest: str) -> None:
        with self._lock:
            if digest in self._stored and not self._config.mirror:  # the mirror's copy was intact when it was put
                self._stored.discard(digest)
                self._begin(lambda: self._delete(blob_object(digest)))

    # --- what the run asks ------------------------------------------------------------------------------

    def prune(self, keep: set[str]) -> None:
        """Remove blobs that are not in `keep`, and pieces of uploads that nobody reads any more.

        Of a mirror, only those that this process knew when it was called: others may be those of a later leader.
        """
        with self._lock:
            self._excused = {(peer, digest) for peer, digest in self._excused if digest in keep}
            if self._trouble:
                return
            unneeded = self._stored - keep
            self._stored &= keep
            if self._config.mirror:
                self._removing |= unneeded
                self._begin(lambda: self._remove(unneeded))
                self._begin(lambda: self._prune(set(), UPLOADS))
            else:
                self._begin(lambda: self._prune({blob_object(digest) for digest in keep}))

    # --- the mirror; none of these is for the thread that handles messages --------------------------------------

    @property
    def is_mirror(self) -> bool:
        return self._config.mirror

    def mirror(self, digests: Iterable[str]) -> None:
        """Put blobs into the mirror unless they are there, and return when all are; while the store cannot be used,
        wait. Raises DamagedBlob if one is damaged on this disk, LinkDown when the run ends meanwhile."""
        wanted = set(digests)

        def put_all() -> bool:
            with self._lock:
                lacking = wanted - self._stored
                free = lacking - self._removing
            sizes = {digest: self.blobs.manifest(digest).size for digest in free}
            return all(self._outcomes([partial(self._mirror, *each) for each in sizes.items()])) and free == lacking

        self._until(put_all)

    def fetch(self) -> None:
        """Fetch the mirror's blobs that are missing here, or damaged. Waits while the store cannot be used. Raises
        StorageFailed, DiskFull, and LinkDown when the run ends meanwhile."""

        def fetch_all() -> bool:
            [found] = self._outcomes([self._listed])
            if found is None:
                return False
            with self._lock:
                self._stored |= found.keys()
            lacking = [digest for digest in found if not self.blobs.has(digest)]
            return all(self._outcomes([partial(self._fetch, digest, found[digest]) for digest in lacking]))

        self._until(fetch_all)

    def mirror_all(self) -> None:
        """Put all intact blobs of this disk into the mirror: those of a run that had no mirror, or another one."""
        here = [f"{ALGORITHM}:{file.name}" for file in self.blobs.folder.glob("*/*") if not file.suffix]
        self.mirror(digest for digest in here if self.blobs.has(digest))

    def mirror_files(self, folder: Path, names: Iterable[str]) -> None:
        """Put files of a folder into the mirror, under `results/`; as `mirror`."""
        jobs = [partial(self._put_file, f"{RESULTS}/{name}", folder / name) for name in names]
        self._until(lambda: all(self._outcomes(jobs)))

    def _until(self, attempt: Callable[[], bool]) -> None:
        """Repeat an attempt until it succeeds. Raises LinkDown when the run ends meanwhile."""
        while not attempt():
            if self._closed.wait(RETRY_S):
                raise LinkDown(f"object store {self._config.url} could not be used until the run ended")

    def _outcomes(self, jobs: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
        """Do work in the threads of this module. Raises its first error, and LinkDown when the run ends meanwhile."""
        futures = [Future[Outcome]() for _ in jobs]
        with self._lock:
            for future, job in zip(futures, jobs, strict=True):
                self._begin(partial(_settle, future, job))
        for future in futures:
            while not future.done():
                if self._closed.is_set():
                    raise LinkDown(f"object store {self._config.url} did not answer until the run ended")
                wait([future], timeout=ENDED_CHECK_S)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Finish what has begun, as far as the store answers."""
        self._closed.set()
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # --- in threads -------------------------------------------------------------------------------------

    def _begin(self, work: Callable[[], object]) -> None:
        """Run work in a thread. The lock is held."""
        if not self._threads:  # they do not keep the process from ending
            self._threads = [
                threading.Thread(target=self._run, name=f"object-store-{number}", daemon=True)
                for number in range(THREADS)
            ]
            for thread in self._threads:
                thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("error in a thread of the object store")

    def _bring(self, manifest: Manifest) -> None:
        """Put a blob into the store unless it is there, and answer the peers that wait for it."""
        digest, trouble, url = manifest.digest, "", ""
        try:
            self._put_blob(digest, manifest.size)
            url = self._signed_or_raise("GET", blob_object(digest))
        except Exception as error:  # noqa: BLE001 - of the store, whatever it is: reported
            trouble = reason_of(error)
        with self._lock:
            self._note(trouble)
            job = self._jobs.pop(digest)
            if not trouble:
                self._stored.add(digest)
            elif not self._is_small(manifest):
                self._excused.update((peer, digest) for peer in job.waiting)
        for failed, located in job.waiting.values():
            if not trouble:
                located(None if failed else url)  # the store works: the peer has no route to it
            elif self._is_small(manifest):
                located(None)

    def _put_blob(self, digest: str, size: int) -> None:
        """Put a blob into the store unless it is there."""
        if not self._has(blob_object(digest), size):
            self._put_path(blob_object(digest), self.blobs.path(digest))

    def _put_path(self, name: str, path: Path) -> None:
        obstore.put(self._store, name, path, chunk_size=PART_BYTES, max_concurrency=1)

    def _mirror(self, digest: str, size: int) -> bool:
        """Whether the blob is in the mirror now."""
        if not self._attempt(lambda: self._put_blob(digest, size)):
            return False
        with self._lock:
            self._stored.add(digest)
        return True

    def _put_file(self, name: str, path: Path) -> bool:
        return self._attempt(lambda: self._put_path(name, path))

    def _listed(self) -> dict[str, int] | None:
        """The sizes of the blobs in the store, by digest; None if it cannot be used."""
        sizes: dict[str, int] = {}

        def look() -> None:
            for batch in obstore.list(self._store, prefix=BLOBS):
                for found in batch:
                    if digest := blob_digest(found["path"]):
                        sizes[digest] = found["size"]

        return sizes if self._attempt(look) else None

    def _fetch(self, digest: str, size: int) -> bool:
        """Whether a blob of the mirror was fetched; a damaged one is removed there. Raises StorageFailed, DiskFull."""
        manifest = Manifest(digest, size, self.blobs.chunk_bytes)
        received = self.blobs.receive(manifest)

        index = 0

        def take(chunk: memoryview) -> bool:
            nonlocal index
            received.write(index, chunk)
            index += 1
            return True

        def bring() -> None:
            store, name = self._store, blob_object(digest)
            if isinstance(store, LocalStore):
                for start in range(0, size, manifest.chunk):
                    end = min(start + manifest.chunk, size)
                    take(memoryview(obstore.get_range(store, name, start=start, end=end)))
            else:
                # as devices do, since a large blob may need longer than the ANSWER_S of a request
                download(self._signed_or_raise("GET", name), 0, size, size, manifest.chunk, take)

        try:
            if not self._attempt(bring):
                received.leave()
                return False
            received.commit()
        except BadPayload as error:
            received.abandon()
            log.error("damaged object", extra={"object": blob_object(digest), "reason": str(error)})
            self._remove({digest})
        except StorageFailed:
            received.leave()
            raise
        return True

    def _remove(self, digests: set[str]) -> None:
        for digest in digests:
            self._delete(blob_object(digest))
            with self._lock:
                self._removing.discard(digest)
                self._stored.discard(digest)

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Use the store, and note whether it works. Errors of this disk are raised."""
        trouble = ""
        try:
            work()
        except LinkDown as error:
            trouble = str(error)
        except FedvitError:
            raise
        except Exception as error:  # noqa: BLE001 - of the store, whatever it is: reported
            trouble = reason_of(error)
        with self._lock:
            self._note(trouble)
        return not trouble

    def _has(self, name: str, size: int) -> bool:
        """Whether an earlier process has put the blob."""
        try:
            return obstore.head(self._store, name)["size"] == size
        except ABSENT:  # or there is no such bucket, which putting shows
            return False

    def _read(self, name: str, size: int) -> bytes | None:
        """Read and remove a piece of an upload; no more than `size` bytes are read."""
        try:
            answer = obstore.get(self._store, name)
            found = answer.meta["size"]
            content = _content(answer, size) if found == size else None
        except ABSENT:
            return None
        except Exception as error:  # noqa: BLE001
            with self._lock:
                self._note(reason_of(error))
            return None
        if content is None:
            log.warning("piece of an upload has a wrong size", extra={"object": name, "bytes": found, "expected": size})
        self._delete(name)
        return content

    def _delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # costs space only, and `_prune` finds it
            obstore.delete(self._store, name)

    def _prune(self, keep: set[str], below: str | None = None) -> None:
        with contextlib.suppress(Exception):  # the next round tries again
            now = datetime.now(UTC)
            for batch in obstore.list(self._store, prefix=below):
                for found in batch:
                    name = found["path"]
                    young = (now - found["last_modified"]).total_seconds() < PIECE_KEPT_S
                    if name not in keep and not (name.startswith(f"{UPLOADS}/") and young):
                        self._delete(name)

    # --- trouble ----------------------------------------------------------------------------------------

    def _is_usable(self) -> bool:
        """Whether the store worked last; otherwise it is tried from time to time. The lock is held."""
        if self._trouble and time.monotonic() - self._tried_at > RETRY_S:
            self._tried_at = time.monotonic()
            self._begin(self._try)
        return not self._trouble

    def _try(self) -> bool:
        """Whether something can be put into the store."""
        trouble = ""
        try:
            obstore.put(self._store, PROBE, b"fedvit")
        except Exception as error:  # noqa: BLE001
            trouble = reason_of(error)
        with self._lock:
            self._note(trouble)
        return not trouble

    def _note(self, trouble: str) -> None:
        """Note whether the store works, and tell the operator what is new. The lock is held."""
        if trouble == self._trouble:
            return
        self._trouble, self._tried_at = trouble, time.monotonic()
        if trouble:
            what = f"object store {self._config.url} cannot be used: {trouble}"
            most = self._config.fallback_bytes / 1e6
            follows = f"blobs up to {most:.3g} MB go over MQTT, larger ones wait for it"
            self._lines.append(f"{what}; {'the run waits for it' if self._config.mirror else follows}")
            log.warning("object store cannot be used", extra={"reason": trouble})
        else:
            self._lines.append(f"object store {self._config.url} can be used again")
            log.info("object store can be used again")

    def _signed(self, method: Literal["GET", "PUT"], name: str) -> str | None:
        """The lock is held."""
        try:
            return self._signed_or_raise(method, name)
        except Exception as error:  # noqa: BLE001 - there are no keys
            self._note(reason_of(error))
            return None

    def _signed_or_raise(self, method: Literal["GET", "PUT"], name: str) -> str:
        assert not isinstance(self._store, LocalStore)  # `takes` refuses every blob then
        return obstore.sign(self._store, method, name, self._valid)


def _settle(future: "Future[Outcome]", job: Callable[[], Outcome]) -> None:
    try:
        future.set_result(job())
    except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
        future.set_exception(error)


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
