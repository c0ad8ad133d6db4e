"""Moving blobs over a transport: one object for both directions.

`fedvit.wire.transfer` and `outgoing` decide what is sent when; this module reads files, sends chunks and writes those
that arrive. The program passes on every BlobNack, BlobAck and UseDedicatedTopic, and every chunk from its inbox, and
calls `tick` often.

If the transport has a thread, chunks are handled there: they go from the socket into the file and never wait in the
inbox, however slow the program's loop is. `finished` is always called in the program's loop.

A blob can also move by URLs, through an object store. Only the side with a `BlobPlaces` decides so: it answers a
BlobNack with a BlobUrl, and asks for pieces of an upload with `BlobNack.put`. Where URLs do not work, chunks are sent,
and continue from what has arrived: both ways fill the same file.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError, LinkDown, StorageFailed
from fedvit.files import storage_failed
from fedvit.partials import PartialBlob
from fedvit.transport.base import Transport, Wake
from fedvit.transport.chunk_sender import ChunkSender, content_of
from fedvit.transport.urls import NoRoute, download, in_thread, is_at, upload
from fedvit.wire.messages import (
    BlobAck,
    BlobNack,
    BlobPut,
    BlobUrl,
    Manifest,
    TransferMessage,
    UrlPiece,
    UrlUse,
    UseDedicatedTopic,
)
from fedvit.wire.transfer import WINDOW_CHUNKS, Chunk, Incoming, decode_chunk

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Silence after which a receiver reports chunks in flight as lost; doubles up to STALL_MAX_S."""
STALL_MAX_S = 30.0
IDLE_S = 0.3
"""Silence after which a receiver sends a nack, in case the last chunks of a burst were lost."""
MAX_RESTARTS = 3
LARGE_BYTES = 1 << 20
"""Blobs from this size on are hashed and synced in a separate thread, without blocking other transfers."""
URL_ATTEMPTS = 2
"""After this many failures in a row, a blob is not fetched, or an upload not put, by URLs any more."""
NO_ROUTE_S = 60.0
"""For how long a store to which no connection could be made is not tried again."""
URL_SIGN_S = 2.0
"""Interval of a receiver's reports of what came by a URL."""
FIRST_PIECE_CHUNKS = 4
"""Chunks of the first piece of an upload. It doubles while pieces take less than PIECE_S, so that each piece is a sign
of life also over a slow link."""
PIECE_S = 2.0
_committer = ThreadPoolExecutor(1, thread_name_prefix="blob-commit")  # its thread starts with the first large blob

Finished = Callable[[Manifest, Exception | None], None]
Located = Callable[[str | None], None]
"""Is called with the URL of a blob, or with None if chunks are to be sent; in any thread."""


class BlobPlaces(Protocol):
    """An object store, as the side sees it that has its keys. No call blocks on the network."""

    def takes(self, manifest: Manifest) -> bool:
        """Return whether such a blob goes through the store at all."""

    def locate(self, peer: str, manifest: Manifest, located: Located, *, failed: bool) -> None:
        """Put a blob into the store, unless it is there, and call `located` then, or at once. While neither the store
        nor chunks can be used, it is not called: the peer asks again. `failed`: URLs did not work for this peer."""

    def is_awaited(self, manifest: Manifest) -> bool:
        """Return whether this side makes peers wait: the blob is being put, or only the store can take it."""

    def upload_url(self, peer: str, manifest: Manifest, first: int) -> str | None:
        """Return a URL for the piece of an upload that begins with chunk `first`; None: use chunks, or, if the blob
        `is_awaited`, wait."""

    def read_upload(
        self, peer: str, manifest: Manifest, first: int, size: int, read: Callable[[bytes | None], None]
    ) -> None:
        """Read and remove a piece; `read(None)` if it is not there or has another size. Called in any thread."""

    def check(self, checked: Callable[[bool], None]) -> None:
        """URLs did not work for a peer: find out whether the store works for this side, and call `checked`, in any
        thread."""

    def forget(self, digest: str) -> None:
        """The blob is damaged on this side: it is put again when it is needed next."""


class _Receiving:
    def __init__(self, manifest: Manifest, partial: PartialBlob, sender: str, topic: str, finished: Finished) -> None:
        self.incoming = Incoming(manifest, partial.have)
        self.partial = partial
        self.sender = sender
        self.topic = topic
        self.dedicated_topic = ""  # the topic for this receiver alone, if there is one
        self.dedicated = False
        self.finished = [finished]
        self.error: Exception | None = None
        self.listening = False
        self.committing = False  # in another thread, which owns its file meanwhile
        self.resumed = any(partial.have)  # chunks sent to an earlier process are lost
        self.heard_at = time.monotonic()
        self.progress_at = 0.0  # arrival of the newest new chunk
        self.new_bytes = 0  # of new chunks, since the last `take_progress`
        self.stall_s = STALL_S
        self.restarts = 0
        self.url_failures = 0  # in a row
        self.downloading = False  # by a URL, in another thread
        self.reported_at = 0.0
        self.piece: UrlPiece | None = None  # of an upload: the sender puts it now
        self.piece_at = 0.0
        self.piece_chunks = FIRST_PIECE_CHUNKS
        self.reading: list[UrlPiece] = []  # pieces of an upload that are being read from the store

    def next_piece(self) -> tuple[int, int] | None:
        """(first chunk, count) of the next piece of an upload; None if all missing chunks are being read."""
        have = bytearray(self.partial.have)
        for piece in self.reading:
            have[piece.first : piece.first + piece.count] = bytes([1]) * piece.count
        if (first := have.find(0)) < 0:
            return None
        end = have.find(1, first, first + self.piece_chunks)
        return first, (end if end >= 0 else min(len(have), first + self.piece_chunks)) - first


class BlobExchange:
    """Fetches blobs into a store and serves them from it.

    `send(peer, message)` sends a control message. `topic_for(digest)` is the topic on which this side
    sends a blob's chunks, `dedicated_topic_for(peer, digest)` that for one receiver which cannot keep up with the
    others. `may_read(peer, digest)` says whether a peer may fetch a blob: the store also holds uploads of
    other devices. `receivers(digest)` is how many peers are expected to ask for a blob now, so that it is
    sent once to all of them. `places` is the object store of the side that has one. The other side sets `store_origin`
    to what was announced to it: URLs of other hosts are refused.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        send: Callable[[str, TransferMessage], None],
        topic_for: Callable[[str], str],
        may_read: Callable[[str, str], bool],
        receivers: Callable[[str], int] = lambda digest: 1,
        dedicated_topic_for: Callable[[str, str], str] | None = None,
        places: BlobPlaces | None = None,
    ) -> None:
        self.store_origin = ""
        self._transport = transport
        self._blobs = blobs
        self._send = send
        self._may_read = may_read
        self._places = places
        self._no_route_until = 0.0
        self._putting: set[str] = set()  # digests of uploads of which a piece is being put
        self._lock = threading.RLock()  # chunks come in the transport's thread
        self._chunks = ChunkSender(
            transport,
            blobs,
            lock=self._lock,
            send=send,
            topic_for=topic_for,
            receivers=receivers,
            dedicated_topic_for=dedicated_topic_for,
        )
        # by (digest, topic): several senders may send the same blob, independently
        self._receiving: dict[tuple[str, str], _Receiving] = {}
        self._ended: list[_Receiving] = []

    @property
    def is_busy(self) -> bool:
        """True while a transfer needs `tick`."""
        return bool(self._receiving or self._chunks or self._ended)

    def under_way(self) -> tuple[int, int]:
        """Numbers of blobs that are being received and sent. May be called from any thread."""
        return len(self._receiving), len(self._chunks)

    # --- receiving ------------------------------------------------------------------------------------

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished, dedicated_topic: str = "") -> None:
        """Receive a blob from `sender`, whose chunks come on `topic`; `finished(manifest, error)` ends it.

        Chunks of an earlier attempt are not asked for again. A blob that is already here is finished at once,
        without a message. `dedicated_topic` is for this receiver alone, if it cannot keep up with others.
        """
        if self._blobs.has(manifest.digest):
            self._send(sender, BlobAck(manifest.digest))
            finished(manifest, None)
            return
        with self._lock:
            digest = manifest.digest
            if running := self._receiving.get((digest, topic)) or self._receiving.get((digest, dedicated_topic)):
                running.finished.append(finished)
                return
            try:
                partial = self._blobs.receive(manifest)
            except StorageFailed as error:
                failed = error
            else:
                receiving = _Receiving(manifest, partial, sender, topic, finished)
                receiving.dedicated_topic = dedicated_topic
                self._receiving[digest, topic] = receiving
                if receiving.incoming.complete:  # an earlier attempt got all chunks
                    self._complete(receiving)
                if self._receiving.get((digest, topic)) is receiving:
                    self._transport.listen(topic, self)
                return
        finished(manifest, failed)

    def listening(self, topic: str) -> None:
        """The subscription of `topic` is confirmed: ask the sender to start, or to start again."""
        with self._lock:
            for receiving in self._receiving.values():
                if receiving.topic == topic and not receiving.committing:
                    again, receiving.listening = receiving.listening or receiving.resumed, True
                    receiving.heard_at = time.monotonic()
                    self._send_nack(receiving, stalled=again)

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        """Store a chunk that arrived; anything unknown or damaged is dropped and asked for again later."""
        with self._lock:
            try:
                chunk = decode_chunk(message)
                receiving = self._receiving.get((chunk.digest, topic))
                if receiving is None or receiving.committing:
                    return
                in_sequence = chunk.seq == receiving.incoming.last_seq + 1
                self._take(receiving, chunk)
            except BadPayload as error:
                log.warning("chunk dropped", extra={"reason": str(error)})
                return
            if not in_sequence:  # a chunk in sequence: the silence before it lost nothing, the link is only slow
                receiving.stall_s = STALL_S
            if self._is_open(receiving) and receiving.incoming.nack_is_due():
                self._send_nack(receiving)

    def _take(self, receiving: _Receiving, chunk: Chunk) -> None:
        """Write a chunk; commit the blob with the last one. Raises BadPayload if it does not fit."""
        fresh = receiving.incoming.accept(chunk)
        receiving.heard_at = time.monotonic()
        if not fresh:
            return
        receiving.progress_at = receiving.heard_at
        receiving.new_bytes += len(chunk.payload)
        try:
            receiving.partial.write(chunk.index, chunk.payload)
        except StorageFailed as error:
            self._end(receiving, error)
            return
        if receiving.incoming.complete:
            self._complete(receiving)

    def _is_open(self, receiving: _Receiving) -> bool:
        """Return whether this transfer still needs chunks: it was not cancelled, and is not being committed."""
        key = (receiving.incoming.manifest.digest, receiving.topic)
        return self._receiving.get(key) is receiving and not receiving.committing

    def _complete(self, receiving: _Receiving) -> None:
        """All chunks are here: commit the blob."""
        if receiving.incoming.manifest.size < LARGE_BYTES:
            self._settle(receiving, _commit(receiving.partial))
        else:
            receiving.committing = True
            _committer.submit(self._commit_large, receiving)

    def _commit_large(self, receiving: _Receiving) -> None:
        error = _commit(receiving.partial)
        with self._lock:
            receiving.committing = False
            if self._receiving.get((receiving.incoming.manifest.digest, receiving.topic)) is receiving:
                self._settle(receiving, error)
            elif error is not None:  # cancelled meanwhile
                receiving.partial.abandon()

    def _settle(self, receiving: _Receiving, error: Exception | None) -> None:
        """The commit succeeded, or failed with `error`. A blob with a wrong digest is fetched again."""
        if isinstance(error, BadPayload):
            receiving.restarts += 1
            receiving.url_failures += 1
            if receiving.restarts > MAX_RESTARTS:
                self._end(receiving, error)
                return
            log.warning("blob fetched again", extra={"reason": str(error)})
            receiving.partial.restart()
            receiving.incoming.restart()
            if receiving.listening:
                self._send_nack(receiving, stalled=True)
        else:
            self._end(receiving, error)

    def _send_nack(self, receiving: _Receiving, *, stalled: bool = False) -> None:
        piece = None
        if self._places and self._places.takes(receiving.incoming.manifest) and receiving.url_failures < URL_ATTEMPTS:
            piece = self._piece(receiving, self._places)
            if piece is None and (receiving.reading or self._places.is_awaited(receiving.incoming.manifest)):
                return
        receiving.reported_at = time.monotonic()
        nack = receiving.incoming.nack(stalled=stalled, apart=receiving.dedicated)
        self._send(receiving.sender, msgspec.structs.replace(nack, url=self._url_use(receiving), put=piece))

    def _end(self, receiving: _Receiving, error: Exception | None) -> None:
        manifest = receiving.incoming.manifest
        if error is not None:
            receiving.partial.abandon()
        receiving.error = error
        del self._receiving[manifest.digest, receiving.topic]
        self._transport.stop_listening(receiving.topic)
        self._send(receiving.sender, BlobAck(manifest.digest))
        self._ended.append(receiving)
        self._transport.inbox.put(Wake())

    def _report_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for receiving in ended:
            for finished in receiving.finished:
                finished(receiving.incoming.manifest, receiving.error)

    def cancel(self, sender: str | None = None) -> None:
        """Stop receiving from one sender, or from all, without a message. Received chunks are kept."""
        with self._lock:
            if sender is None:
                self._putting.clear()
            for key, receiving in list(self._receiving.items()):
                if sender in (None, receiving.sender):
                    if not receiving.committing:
                        receiving.partial.leave()
                    self._transport.stop_listening(receiving.topic)
                    del self._receiving[key]
            self._ended = [receiving for receiving in self._ended if sender not in (None, receiving.sender)]

    def take_progress(self, sender: str) -> tuple[float, int]:
        """(arrival of the newest new chunk from a sender, bytes of new chunks since the last call).

        The arrival is on the monotonic clock, and 0.0 without new chunks.
        """
        newest, size = 0.0, 0
        with self._lock:
            for receiving in self._receiving.values():
                if receiving.sender == sender and receiving.new_bytes:
                    newest, size = max(newest, receiving.progress_at), size + receiving.new_bytes
                    receiving.new_bytes = 0
        return newest, size

    def on_use_dedicated_topic(self, sender: str, dedicated: UseDedicatedTopic) -> None:
        """The sender moves this receiver to its dedicated topic."""
        with self._lock:
            receiving = self._found(dedicated.digest, sender)
            if receiving is None or receiving.dedicated or receiving.committing or not receiving.dedicated_topic:
                return
            self._transport.stop_listening(receiving.topic)
            del self._receiving[dedicated.digest, receiving.topic]
            receiving.dedicated, receiving.topic, receiving.listening = True, receiving.dedicated_topic, False
            self._receiving[dedicated.digest, receiving.topic] = receiving
            receiving.incoming.switch_topic()
            self._transport.listen(receiving.dedicated_topic, self)

    def _found(self, digest: str, sender: str) -> _Receiving | None:
        """Find the blobs that are being received from a sender."""
        found = (one for (its, _), one in self._receiving.items() if (its, one.sender) == (digest, sender))
        return next(found, None)

    # --- receiving by URLs ----------------------------------------------------------------------------

    def _url_use(self, receiving: _Receiving) -> UrlUse:
        if not self.store_origin:
            return ""
        if receiving.downloading:
            return "used"
        return "failed" if receiving.url_failures >= URL_ATTEMPTS or self._has_no_route() else "ask"

    def _has_no_route(self) -> bool:
        return time.monotonic() < self._no_route_until

    def on_url(self, sender: str, found: BlobUrl) -> None:
        """A blob can be fetched from a URL. Raises BadPayload for a URL of another host than was announced."""
        with self._lock:
            receiving = self._found(found.digest, sender)
            if receiving is None or receiving.downloading or not self._is_open(receiving):
                return
            if not is_at(found.url, self.store_origin):
                receiving.url_failures = URL_ATTEMPTS
                self._send_nack(receiving, stalled=True)
                raise BadPayload(f"{sender} names a URL of another host than {self.store_origin or 'none'}")
            receiving.downloading = True
        in_thread(partial(self._download, receiving, found.url))

    def _download(self, receiving: _Receiving, url: str) -> None:
        """Runs in a thread: fetch missing chunks until the blob is complete, its digest is wrong, or the URL fails."""
        manifest, restarts, failure = receiving.incoming.manifest, receiving.restarts, None
        index, taken = 0, 0

        def take(piece: memoryview) -> bool:
            nonlocal index, taken
            with self._lock:
                if not self._is_open(receiving) or receiving.restarts != restarts:
                    return False
                seq = receiving.incoming.last_seq
                self._take(receiving, Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, piece))
            index, taken = index + 1, taken + len(piece)
            return True

        try:
            while receiving.restarts == restarts:
                with self._lock:
                    if not self._is_open(receiving):
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
                self._note_route(failure, receiving.url_failures)
            if self._is_open(receiving):
                self._send_nack(receiving, stalled=True)

    def _note_route(self, failure: LinkDown, failures: int) -> None:
        if isinstance(failure, NoRoute) and failures >= URL_ATTEMPTS:
            self._no_route_until = time.monotonic() + NO_ROUTE_S

    def _piece(self, receiving: _Receiving, places: BlobPlaces) -> UrlPiece | None:
        """The piece of an upload that its sender is to put, with a new URL; None if it cannot be put now."""
        before = receiving.piece
        chosen = (before.first, before.count) if before else receiving.next_piece()
        url = chosen and places.upload_url(receiving.sender, receiving.incoming.manifest, chosen[0])
        if not chosen or not url:
            return None
        if before is None:
            receiving.piece_at = time.monotonic()
        receiving.piece = UrlPiece(url, *chosen)
        return receiving.piece

    def on_put(self, sender: str, put: BlobPut) -> None:
        """The sender of an upload has put a piece into the store, or could not."""
        with self._lock:
            receiving = self._found(put.digest, sender)
            piece = receiving.piece if receiving else None
            if receiving is None or piece is None or (piece.first, piece.count) != (put.first, put.count):
                return
            receiving.piece = None
            assert self._places is not None  # it named the piece
            if not put.stored:
                self._places.check(partial(self._checked, receiving))
                return
            receiving.heard_at, receiving.stall_s = time.monotonic(), STALL_S
            fast = receiving.heard_at - receiving.piece_at < PIECE_S
            receiving.piece_chunks = (
                min(WINDOW_CHUNKS, 2 * piece.count) if fast else max(FIRST_PIECE_CHUNKS, piece.count // 2)
            )
            receiving.reading.append(piece)
            manifest = receiving.incoming.manifest
            size = min(manifest.size, (piece.first + piece.count) * manifest.chunk) - piece.first * manifest.chunk
            self._places.read_upload(sender, manifest, piece.first, size, partial(self._read, receiving, piece))
            self._send_nack(receiving)  # the next piece is put while this one is read

    def _read(self, receiving: _Receiving, piece: UrlPiece, content: bytes | None) -> None:
        """A piece of an upload was read from the store, or is not there. Runs in a thread of the store."""
        with self._lock:
            receiving.reading.remove(piece)
            if content is None:
                assert self._places is not None  # it was read there
                self._places.check(partial(self._checked, receiving))
                return
            receiving.url_failures = 0
            manifest, seq, view = receiving.incoming.manifest, receiving.incoming.last_seq, memoryview(content)
            for number in range(piece.count):
                if not self._is_open(receiving):
                    return
                payload = view[number * manifest.chunk : (number + 1) * manifest.chunk]
                index = piece.first + number
                self._take(receiving, Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, payload))
            if self._is_open(receiving) and receiving.piece is None:
                self._send_nack(receiving, stalled=True)

    def _checked(self, receiving: _Receiving, works: bool) -> None:
        """A piece did not come. If the store `works`, its sender cannot use it, or does not as it should."""
        with self._lock:
            receiving.url_failures += works
            if self._is_open(receiving) and receiving.piece is None:
                self._send_nack(receiving, stalled=True)

    # --- sending --------------------------------------------------------------------------------------

    def on_nack(self, peer: str, nack: BlobNack) -> None:
        """A receiver reports missing chunks. Raises BadPayload for a blob that it may not fetch and for invalid chunks,
        StorageFailed when the blob cannot be read."""
        if not self._may_read(peer, nack.digest):
            raise BadPayload(f"{peer} asks for blob {nack.digest}, which it was not offered")
        if nack.put and is_at(nack.put.url, self.store_origin) and not self._has_no_route():
            self._put(peer, nack.digest, nack.put)
        elif nack.url and self._places and not self._chunks.sends_to(peer, nack.digest):
            if nack.url != "used":
                manifest, failed = self._blobs.manifest(nack.digest), nack.url == "failed"
                if self._places.takes(manifest):
                    self._places.locate(peer, manifest, partial(self._located, peer, nack), failed=failed)
                else:
                    self._chunks.send(peer, nack)
        else:
            self._chunks.send(peer, nack)

    def _located(self, peer: str, nack: BlobNack, url: str | None) -> None:
        """The blob is in the store, or its chunks are to be sent. Runs in any thread."""
        if url is not None:
            self._send(peer, BlobUrl(nack.digest, url))
            return
        try:
            self._chunks.send(peer, nack)
        except FedvitError as error:  # the receiver asks again, and then the program's loop handles it
            log.warning("blob not sent", extra={"peer": peer, "reason": str(error)})

    @property
    def has_store(self) -> bool:
        """True if blobs have another place than this side's disk."""
        return self._places is not None

    def is_awaited(self, digest: str) -> bool:
        """Return whether peers wait for the store with this blob, to get it or to send it."""
        if self._places is None:
            return False
        with self._lock:
            incoming = next((one.incoming.manifest for (its, _), one in self._receiving.items() if its == digest), None)
        if incoming is None and not self._blobs.has(digest):
            return False
        manifest = incoming or self._blobs.manifest(digest)
        return self._places.takes(manifest) and self._places.is_awaited(manifest)

    def _put(self, peer: str, digest: str, piece: UrlPiece) -> None:
        """Start to put a piece of an upload to its URL, unless one is being put. Raises BadPayload if there is no such
        piece."""
        manifest = self._blobs.manifest(digest)
        if piece.first + piece.count > manifest.chunks:
            raise BadPayload(f"{peer} wants chunks up to {piece.first + piece.count} of {manifest.chunks}")
        with self._lock:
            if digest in self._putting:
                return
            self._putting.add(digest)
        content = memoryview(content_of(self._blobs, manifest))
        part = content[piece.first * manifest.chunk : (piece.first + piece.count) * manifest.chunk]
        in_thread(partial(self._upload, peer, digest, piece, part))

    def _upload(self, peer: str, digest: str, piece: UrlPiece, part: memoryview) -> None:
        stored = False
        try:
            upload(piece.url, part, lambda: digest in self._putting)
            stored = True
        except LinkDown as error:
            log.warning("upload not put to a URL", extra={"digest": digest, "reason": str(error)})
            self._note_route(error, URL_ATTEMPTS)
        with self._lock:
            needed = digest in self._putting
            self._putting.discard(digest)
        if needed:
            self._send(peer, BlobPut(digest, piece.first, piece.count, stored))

    def on_ack(self, peer: str, ack: BlobAck) -> None:
        with self._lock:
            self._putting.discard(ack.digest)
            self._chunks.note_receipt(peer, ack.digest)

    def stop_sending(self, digest: str) -> None:
        """Stop sending a blob whose file is replaced; receivers ask again, and get the new file."""
        with self._lock:
            self._chunks.stop(digest)
        if self._places:
            self._places.forget(digest)

    def drop_peer(self, peer: str) -> None:
        """Forget a peer that is gone."""
        with self._lock:
            self._chunks.drop_peer(peer)
            self.cancel(peer)

    # --- time -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send due chunks, report finished transfers, and send nacks after silence. Call a few times per second."""
        with self._lock:
            now = time.monotonic()
            self._chunks.tick(now)
            for receiving in list(self._receiving.values()):
                silent_s = now - receiving.heard_at
                if receiving.committing or not receiving.listening:
                    continue  # nothing is missing, or the subscription is not confirmed yet
                if receiving.downloading:
                    if now - receiving.reported_at > URL_SIGN_S:
                        self._send_nack(receiving)
                elif silent_s > receiving.stall_s:
                    receiving.heard_at = now
                    receiving.stall_s = min(STALL_MAX_S, 2 * receiving.stall_s)
                    self._send_nack(receiving, stalled=True)
                elif silent_s > IDLE_S and receiving.incoming.nack_is_due(idle=True):
                    self._send_nack(receiving)
        self._report_ended()

    def on_reconnect(self) -> None:
        """The link came back: chunks in flight are lost."""
        with self._lock:
            for receiving in self._receiving.values():
                receiving.heard_at = time.monotonic()
                receiving.stall_s = STALL_S
                if receiving.listening and not receiving.committing:
                    self._send_nack(receiving, stalled=True)


def _commit(partial: PartialBlob) -> Exception | None:
    """Commit a blob; returns the error, or None."""
    try:
        partial.commit()
    except BadPayload as error:
        return error
    except OSError as error:
        return storage_failed("cannot keep a received blob", error)
    except Exception as error:  # noqa: BLE001 - raised again by the program's loop
        return error
    return None
