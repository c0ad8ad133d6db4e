"""The object store of a run: large blobs are put there once, and devices get signed URLs.

All calls to the store are made by threads of this module. The coordinator's keys come from the environment, as for
other programs (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), and never reach the record, a log or a device.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from queue import SimpleQueue
from typing import Literal

import obstore
from obstore.exceptions import PermissionDeniedError
from obstore.store import S3Store

from coordinator.config.blobs import BlobsConfig
from fedvit.blobs import BlobStore
from fedvit.transport.exchange import Located
from fedvit.wire.messages import Manifest

log = logging.getLogger(__name__)

THREADS = 4
SLOW_S = 10.0
"""After this time a blob that is still being put is sent over MQTT, if it is small enough."""
RETRY_S = 5.0
"""How often a store in trouble is tried again."""
PART_BYTES = 16 << 20
"""Of a large blob that is put; the store takes one part after the other."""
ANSWER_S = 60.0
"""Longest time for one request: a part needs it on a link of 2 Mb/s."""
PIECE_KEPT_S = 24 * 3600.0
"""How long pieces of uploads that nobody read are kept."""
CLOSE_S = 10.0
ABSENT = (FileNotFoundError, PermissionDeniedError)
"""What S3 answers for an object that is not there; without the right to list a bucket it is the second."""
PROBE = "probe"
BLOBS, UPLOADS = "blobs", "uploads"


@dataclass
class _Job:
    """A blob that is being put, and the peers that wait for it."""

    began: float = field(default_factory=time.monotonic)
    waiting: dict[str, tuple[bool, Located]] = field(default_factory=dict)


class ObjectStore:
    """A `fedvit.transport.exchange.BlobPlaces` on S3. Objects of a run are below PREFIX/RUN."""

    def __init__(self, config: BlobsConfig, run: str, blobs: BlobStore) -> None:
        assert config.url is not None  # checked by the caller
        self._config = config
        self.blobs = blobs
        self._valid = timedelta(seconds=config.url_valid_s)
        self._store = S3Store(
            config.bucket,
            prefix=f"{config.prefix}/{run}".strip("/"),
            endpoint=config.origin,
            region=config.region,
            virtual_hosted_style_request=False,
            client_options={
                "allow_http": config.origin.startswith("http://"),
                "connect_timeout": timedelta(seconds=SLOW_S / 2),
                "timeout": timedelta(seconds=ANSWER_S),
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=SLOW_S)},
        )
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._trouble = ""  # why the store cannot be used
        self._tried_at = 0.0
        self._stored: set[str] = set()
        self._jobs: dict[str, _Job] = {}  # by digest
        self._excused: set[tuple[str, str]] = set()  # peer and digest: the store is why URLs failed
        self._lines: list[str] = []

    def take_lines(self) -> list[str]:
        """Lines for the operator since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
        return lines

    # --- what the exchange asks -------------------------------------------------------------------------

    def takes(self, manifest: Manifest) -> bool:
        return manifest.size >= self._config.min_bytes

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
                url = self._signed("GET", _of_blob(digest))
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
            if digest in self._stored:
                self._stored.discard(digest)
                self._begin(lambda: self._delete(_of_blob(digest)))

    # --- what the run asks ------------------------------------------------------------------------------

    def prune(self, keep: set[str]) -> None:
        """Remove blobs that are not in `keep`, and pieces of uploads that nobody reads any more."""
        with self._lock:
            self._stored &= keep
            self._excused = {(peer, digest) for peer, digest in self._excused if digest in keep}
            if not self._trouble:
                self._begin(lambda: self._prune({_of_blob(digest) for digest in keep}))

    def close(self) -> None:
        """Finish what has begun, as far as the store answers."""
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
            if not self._has(_of_blob(digest), manifest.size):
                path = self.blobs.path(digest)
                obstore.put(self._store, _of_blob(digest), path, chunk_size=PART_BYTES, max_concurrency=1)
            url = self._signed_or_raise("GET", _of_blob(digest))
        except Exception as error:  # noqa: BLE001 - of the store, whatever it is: reported
            trouble = _reason(error)
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
            content = bytes(answer.bytes()) if found == size else None
        except ABSENT:
            return None
        except Exception as error:  # noqa: BLE001
            with self._lock:
                self._note(_reason(error))
            return None
        if content is None:
            log.warning("piece of an upload has a wrong size", extra={"object": name, "bytes": found, "expected": size})
        self._delete(name)
        return content

    def _delete(self, name: str) -> None:
        with contextlib.suppress(Exception):  # costs space only, and `_prune` finds it
            obstore.delete(self._store, name)

    def _prune(self, keep: set[str]) -> None:
        with contextlib.suppress(Exception):  # the next round tries again
            now = datetime.now(UTC)
            for batch in obstore.list(self._store):
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
            trouble = _reason(error)
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
            self._lines.append(f"{what}; blobs up to {most:.3g} MB go over MQTT, larger ones wait for it")
            log.warning("object store cannot be used", extra={"reason": trouble})
        else:
            self._lines.append(f"object store {self._config.url} can be used again")
            log.info("object store can be used again")

    def _signed(self, method: Literal["GET", "PUT"], name: str) -> str | None:
        """The lock is held."""
        try:
            return self._signed_or_raise(method, name)
        except Exception as error:  # noqa: BLE001 - there are no keys
            self._note(_reason(error))
            return None

    def _signed_or_raise(self, method: Literal["GET", "PUT"], name: str) -> str:
        return obstore.sign(self._store, method, name, self._valid)


def _of_blob(digest: str) -> str:
    return f"{BLOBS}/{digest.partition(':')[2]}"


def _of_piece(peer: str, digest: str, first: int) -> str:
    return f"{UPLOADS}/{peer}/{digest.partition(':')[2]}-{first}"


def _reason(error: Exception) -> str:
    """An error of the store in one line."""
    text = str(error)
    code, message = (re.search(f"<{tag}>(.*?)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    if "error sending request" in text:
        return "no answer from it"
    return re.sub(r" in [\d.]+\S*s\b.*", "", text.partition("\n")[0])[:300]
