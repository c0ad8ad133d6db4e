"""Move blobs by URLs, through an object store.

Only the side with a `BlobPlaces` decides so: it answers a BlobNack with a BlobUrl, and asks for pieces of an upload
with `BlobNack.put`. Where URLs do not work, chunks are sent, and continue from what has arrived.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, LinkDown
from fedvit.transport.blob_places import BlobPlaces
from fedvit.transport.blob_receiver import FIRST_PIECE_CHUNKS, STALL_S, BlobReceiver, Receiving, UrlState
from fedvit.transport.chunk_sender import content_of
from fedvit.transport.urls import NoRoute, download, in_thread, is_at, upload
from fedvit.wire.messages import BlobPut, BlobUrl, TransferMessage, UrlPiece, UrlUse
from fedvit.wire.transfer import WINDOW_CHUNKS, Chunk

log = logging.getLogger(__name__)

URL_ATTEMPTS = 2
"""After this many failures in a row, a blob is not fetched, or an upload not put, by URLs any more."""
NO_ROUTE_S = 60.0
"""Time for which a store to which no connection could be made is not tried again."""
PIECE_S = 2.0


class Route:
    """The way to the store: `origin` as it was announced, and failures to connect. URLs of other hosts are refused."""

    def __init__(self) -> None:
        self.origin = ""
        self._blocked_until = 0.0

    def is_blocked(self) -> bool:
        return time.monotonic() < self._blocked_until

    def note_failure(self, failure: LinkDown, failures: int) -> None:
        if isinstance(failure, NoRoute) and failures >= URL_ATTEMPTS:
            self._blocked_until = time.monotonic() + NO_ROUTE_S


class UrlReceiver:
    """Fetches blobs from URLs, and reads from the store the pieces of uploads that their senders put there."""

    def __init__(
        self, receiver: BlobReceiver, *, lock: threading.RLock, route: Route, places: BlobPlaces | None
    ) -> None:
        self._receiver = receiver
        self._lock = lock
        self._route = route
        self._places = places
        receiver.describe_urls = self.describe

    def describe(self, receiving: Receiving) -> UrlState | None:
        """Return the use of URLs for a nack; None if the peer waits for the store and gets no nack."""
        piece, manifest = None, receiving.incoming.manifest
        if self._places and self._places.takes(manifest) and receiving.url_failures < URL_ATTEMPTS:
            piece = self._choose_piece(receiving, self._places)
            if piece is None and (receiving.reading or self._places.is_awaited(manifest)):
                return None
        return self._describe_use(receiving), piece

    def _describe_use(self, receiving: Receiving) -> UrlUse:
        if not self._route.origin:
            return ""
        if receiving.downloading:
            return "used"
        return "failed" if receiving.url_failures >= URL_ATTEMPTS or self._route.is_blocked() else "ask"

    def on_url(self, sender: str, url: BlobUrl) -> None:
        """Fetch a blob from a URL. Raises BadPayload for a URL of another host than was announced."""
        with self._lock:
            receiving = self._receiver.find(url.digest, sender)
            if receiving is None or receiving.downloading or not self._receiver.is_open(receiving):
                return
            if not is_at(url.url, self._route.origin):
                receiving.url_failures = URL_ATTEMPTS
                self._receiver.send_nack(receiving, stalled=True)
                raise BadPayload("FV1217", f"{sender} names a URL of another host than {self._route.origin or 'none'}")
            receiving.downloading = True
        in_thread(partial(self._download, receiving, url.url))

    def _download(self, receiving: Receiving, url: str) -> None:
        """Fetch missing chunks until the blob is complete, its digest is wrong, or the URL fails. Runs in a thread."""
        manifest, restarts, failure = receiving.incoming.manifest, receiving.restarts, None
        index, taken = 0, 0

        def take(piece: memoryview) -> bool:
            nonlocal index, taken
            with self._lock:
                if not self._receiver.is_open(receiving) or receiving.restarts != restarts:
                    return False
                seq = receiving.incoming.last_seq
                self._receiver.take(
                    receiving, Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, piece)
                )
            index, taken = index + 1, taken + len(piece)
            return True

        try:
            while receiving.restarts == restarts:
                with self._lock:
                    if not self._receiver.is_open(receiving):
                        break
                    first, count = receiving.incoming.nack().missing[0]
                index, end = first, min(manifest.size, (first + count) * manifest.chunk)
                download(url, first * manifest.chunk, end, manifest.size, manifest.chunk, take)
        except LinkDown as error:
            failure = error
        finally:
            receiving.downloading = False
        with self._lock:
            if failure:
                log.warning("blob not fetched by a URL", extra={"digest": manifest.digest, "reason": str(failure)})
                receiving.url_failures = 1 if taken else receiving.url_failures + 1
                self._route.note_failure(failure, receiving.url_failures)
            if self._receiver.is_open(receiving):
                self._receiver.send_nack(receiving, stalled=True)

    def _choose_piece(self, receiving: Receiving, places: BlobPlaces) -> UrlPiece | None:
        """Choose the piece of an upload that its sender is to put, with a new URL; None if it cannot be put now."""
        before = receiving.piece
        bounds = (before.first, before.count) if before else receiving.next_piece()
        url = bounds and places.upload_url(receiving.sender, receiving.incoming.manifest, bounds[0])
        if not bounds or not url:
            return None
        if before is None:
            receiving.piece_at = time.monotonic()
        receiving.piece = UrlPiece(url, *bounds)
        return receiving.piece

    def on_put(self, sender: str, put: BlobPut) -> None:
        """Read a piece that the sender of an upload has put into the store, or go on without it."""
        with self._lock:
            receiving = self._receiver.find(put.digest, sender)
            piece = receiving.piece if receiving else None
            if receiving is None or piece is None or (piece.first, piece.count) != (put.first, put.count):
                return
            receiving.piece = None
            assert self._places is not None  # it named the piece
            if not put.stored:
                self._places.check(partial(self._go_on, receiving))
                return
            receiving.heard_at, receiving.stall_s = time.monotonic(), STALL_S
            fast = receiving.heard_at - receiving.piece_at < PIECE_S
            receiving.piece_chunks = (
                min(WINDOW_CHUNKS, 2 * piece.count) if fast else max(FIRST_PIECE_CHUNKS, piece.count // 2)
            )
            receiving.reading.append(piece)
            manifest = receiving.incoming.manifest
            size = min(manifest.size, (piece.first + piece.count) * manifest.chunk) - piece.first * manifest.chunk
            self._places.read_upload(sender, manifest, piece.first, size, partial(self._take_piece, receiving, piece))
            self._receiver.send_nack(receiving)  # the next piece is put while this one is read

    def _take_piece(self, receiving: Receiving, piece: UrlPiece, content: bytes | None) -> None:
        """Take a piece that was read from the store; None if it is not there. Runs in a thread of the store."""
        with self._lock:
            receiving.reading.remove(piece)
            if content is None:
                assert self._places is not None  # it was read there
                self._places.check(partial(self._go_on, receiving))
                return
            receiving.url_failures = 0
            manifest, seq, view = receiving.incoming.manifest, receiving.incoming.last_seq, memoryview(content)
            for number in range(piece.count):
                if not self._receiver.is_open(receiving):
                    return
                payload = view[number * manifest.chunk : (number + 1) * manifest.chunk]
                index = piece.first + number
                self._receiver.take(
                    receiving, Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, payload)
                )
            if self._receiver.is_open(receiving) and receiving.piece is None:
                self._receiver.send_nack(receiving, stalled=True)

    def _go_on(self, receiving: Receiving, works: bool) -> None:
        """Ask again for a piece that did not come. If the store `works`, its sender uses it wrongly or not at all."""
        with self._lock:
            receiving.url_failures += works
            if self._receiver.is_open(receiving) and receiving.piece is None:
                self._receiver.send_nack(receiving, stalled=True)


class UrlSender:
    """Puts the pieces of uploads that the other side asked for."""

    def __init__(
        self, blobs: BlobStore, *, lock: threading.RLock, send: Callable[[str, TransferMessage], None], route: Route
    ) -> None:
        self._blobs = blobs
        self._lock = lock
        self._send = send
        self._route = route
        self.putting: set[str] = set()  # digests of uploads of which a piece is being put

    def put(self, peer: str, digest: str, piece: UrlPiece) -> None:
        """Start to put a piece of an upload to its URL, unless one is being put. Raises BadPayload if there is no such
        piece."""
        manifest = self._blobs.manifest(digest)
        if piece.first + piece.count > manifest.chunks:
            raise BadPayload("FV1217", f"{peer} wants chunks up to {piece.first + piece.count} of {manifest.chunks}")
        with self._lock:
            if digest in self.putting:
                return
            self.putting.add(digest)
        content = memoryview(content_of(self._blobs, manifest))
        part = content[piece.first * manifest.chunk : (piece.first + piece.count) * manifest.chunk]
        in_thread(partial(self._upload, peer, digest, piece, part))

    def _upload(self, peer: str, digest: str, piece: UrlPiece, part: memoryview) -> None:
        stored = False
        try:
            upload(piece.url, part, lambda: digest in self.putting)
            stored = True
        except LinkDown as error:
            log.warning("upload not put to a URL", extra={"digest": digest, "reason": str(error)})
            self._route.note_failure(error, URL_ATTEMPTS)
        with self._lock:
            needed = digest in self.putting
            self.putting.discard(digest)
        if needed:
            self._send(peer, BlobPut(digest, piece.first, piece.count, stored))
