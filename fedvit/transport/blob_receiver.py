"""Receive blobs: chunks that arrive go into files, and missing ones are asked for again.

`fedvit.wire.transfer` decides what is asked for when. Pieces that come by URLs (`url_transfers`) fill the same files.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, StorageFailed
from fedvit.files import storage_failed
from fedvit.partials import PartialBlob
from fedvit.transport.base import Transport, Wake
from fedvit.wire.messages import BlobAck, Manifest, TransferMessage, UrlPiece, UrlUse, UseDedicatedTopic
from fedvit.wire.transfer import Chunk, Incoming, decode_chunk

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Silence after which a receiver reports chunks in flight as lost; doubles up to STALL_MAX_S."""
STALL_MAX_S = 30.0
IDLE_S = 0.3
"""Silence after which a receiver sends a nack, in case the last chunks of a burst were lost."""
MAX_RESTARTS = 3
LARGE_BYTES = 1 << 20
"""Blobs from this size on are hashed and synced in a separate thread, without blocking other transfers."""
URL_SIGN_S = 2.0
"""Interval of a receiver's reports of what came by a URL."""
FIRST_PIECE_CHUNKS = 4
"""Chunks of the first piece of an upload. It doubles while pieces take less than `url_transfers.PIECE_S`, so that each
piece is a sign of life also over a slow link."""
_committer = ThreadPoolExecutor(1, thread_name_prefix="blob-commit")  # its thread starts with the first large blob

Finished = Callable[[Manifest, Exception | None], None]
UrlState = tuple[UrlUse, UrlPiece | None]
"""The use of URLs that a nack reports, and the piece of an upload that its sender is to put."""


class Receiving:
    """A blob that is being received."""

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


class BlobReceiver:
    """The blobs that are being received.

    `lock` is the exchange's lock, since chunks come in the transport's thread. `describe_urls` is set where URLs may be
    used; it returns None while peers wait for the store.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        lock: threading.RLock,
        send: Callable[[str, TransferMessage], None],
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._lock = lock
        self._send = send
        self.describe_urls: Callable[[Receiving], UrlState | None] = lambda receiving: ("", None)
        # by (digest, topic): several senders may send the same blob, independently
        self.transfers: dict[tuple[str, str], Receiving] = {}
        self.ended: list[Receiving] = []

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
            if running := self.transfers.get((digest, topic)) or self.transfers.get((digest, dedicated_topic)):
                running.finished.append(finished)
                return
            try:
                partial = self._blobs.receive(manifest)
            except StorageFailed as error:
                failed = error
            else:
                receiving = Receiving(manifest, partial, sender, topic, finished)
                receiving.dedicated_topic = dedicated_topic
                self.transfers[digest, topic] = receiving
                if receiving.incoming.complete:  # an earlier attempt got all chunks
                    self._complete(receiving)
                if self.transfers.get((digest, topic)) is receiving:
                    self._transport.listen(topic, self)
                return
        finished(manifest, failed)

    def listening(self, topic: str) -> None:
        """The subscription of `topic` is confirmed: ask the sender to start, or to start again."""
        with self._lock:
            for receiving in self.transfers.values():
                if receiving.topic == topic and not receiving.committing:
                    again, receiving.listening = receiving.listening or receiving.resumed, True
                    receiving.heard_at = time.monotonic()
                    self.send_nack(receiving, stalled=again)

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        """Store a chunk that arrived; anything unknown or damaged is dropped and asked for again later."""
        with self._lock:
            try:
                chunk = decode_chunk(message)
                receiving = self.transfers.get((chunk.digest, topic))
                if receiving is None or receiving.committing:
                    return
                in_sequence = chunk.seq == receiving.incoming.last_seq + 1
                self.take(receiving, chunk)
            except BadPayload as error:
                log.warning("chunk dropped", extra={"reason": str(error)})
                return
            if not in_sequence:  # a chunk in sequence: the silence before it lost nothing, the link is only slow
                receiving.stall_s = STALL_S
            if self.is_open(receiving) and receiving.incoming.nack_is_due():
                self.send_nack(receiving)

    def take(self, receiving: Receiving, chunk: Chunk) -> None:
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

    def is_open(self, receiving: Receiving) -> bool:
        """Return whether this transfer still needs chunks: it was not cancelled, and is not being committed."""
        key = (receiving.incoming.manifest.digest, receiving.topic)
        return self.transfers.get(key) is receiving and not receiving.committing

    def _complete(self, receiving: Receiving) -> None:
        """All chunks are here: commit the blob."""
        if receiving.incoming.manifest.size < LARGE_BYTES:
            self._settle(receiving, _commit(receiving.partial))
        else:
            receiving.committing = True
            _committer.submit(self._commit_large, receiving)

    def _commit_large(self, receiving: Receiving) -> None:
        error = _commit(receiving.partial)
        with self._lock:
            receiving.committing = False
            if self.transfers.get((receiving.incoming.manifest.digest, receiving.topic)) is receiving:
                self._settle(receiving, error)
            elif error is not None:  # cancelled meanwhile
                receiving.partial.abandon()

    def _settle(self, receiving: Receiving, error: Exception | None) -> None:
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
                self.send_nack(receiving, stalled=True)
        else:
            self._end(receiving, error)

    def send_nack(self, receiving: Receiving, *, stalled: bool = False) -> None:
        """Ask the sender for what is missing, unless the object store will bring it."""
        if (urls := self.describe_urls(receiving)) is None:
            return
        use, piece = urls
        receiving.reported_at = time.monotonic()
        nack = receiving.incoming.nack(stalled=stalled, apart=receiving.dedicated)
        self._send(receiving.sender, msgspec.structs.replace(nack, url=use, put=piece))

    def _end(self, receiving: Receiving, error: Exception | None) -> None:
        manifest = receiving.incoming.manifest
        if error is not None:
            receiving.partial.abandon()
        receiving.error = error
        del self.transfers[manifest.digest, receiving.topic]
        self._transport.stop_listening(receiving.topic)
        self._send(receiving.sender, BlobAck(manifest.digest))
        self.ended.append(receiving)
        self._transport.inbox.put(Wake())

    def report_ended(self) -> None:
        with self._lock:
            ended, self.ended = self.ended, []
        for receiving in ended:
            for finished in receiving.finished:
                finished(receiving.incoming.manifest, receiving.error)

    def cancel(self, sender: str | None = None) -> None:
        """Stop receiving from one sender, or from all, without a message. Received chunks are kept."""
        with self._lock:
            for key, receiving in list(self.transfers.items()):
                if sender in (None, receiving.sender):
                    if not receiving.committing:
                        receiving.partial.leave()
                    self._transport.stop_listening(receiving.topic)
                    del self.transfers[key]
            self.ended = [receiving for receiving in self.ended if sender not in (None, receiving.sender)]

    def take_progress(self, sender: str) -> tuple[float, int]:
        """(arrival of the newest new chunk from a sender, bytes of new chunks since the last call).

        The arrival is on the monotonic clock, and 0.0 without new chunks.
        """
        newest, size = 0.0, 0
        with self._lock:
            for receiving in self.transfers.values():
                if receiving.sender == sender and receiving.new_bytes:
                    newest, size = max(newest, receiving.progress_at), size + receiving.new_bytes
                    receiving.new_bytes = 0
        return newest, size

    def on_use_dedicated_topic(self, sender: str, dedicated: UseDedicatedTopic) -> None:
        """The sender moves this receiver to its dedicated topic."""
        with self._lock:
            receiving = self.find(dedicated.digest, sender)
            if receiving is None or receiving.dedicated or receiving.committing or not receiving.dedicated_topic:
                return
            self._transport.stop_listening(receiving.topic)
            del self.transfers[dedicated.digest, receiving.topic]
            receiving.dedicated, receiving.topic, receiving.listening = True, receiving.dedicated_topic, False
            self.transfers[dedicated.digest, receiving.topic] = receiving
            receiving.incoming.switch_topic()
            self._transport.listen(receiving.dedicated_topic, self)

    def find(self, digest: str, sender: str) -> Receiving | None:
        """Find the transfer of a blob from a sender."""
        transfers = (one for (its, _), one in self.transfers.items() if (its, one.sender) == (digest, sender))
        return next(transfers, None)

    def find_manifest(self, digest: str) -> Manifest | None:
        """Find the manifest of a blob that is being received from any sender."""
        with self._lock:
            return next((one.incoming.manifest for (its, _), one in self.transfers.items() if its == digest), None)

    def tick(self, now: float) -> None:
        """Report finished transfers, and send nacks after silence."""
        with self._lock:
            for receiving in list(self.transfers.values()):
                silent_s = now - receiving.heard_at
                if receiving.committing or not receiving.listening:
                    continue  # nothing is missing, or the subscription is not confirmed yet
                if receiving.downloading:
                    if now - receiving.reported_at > URL_SIGN_S:
                        self.send_nack(receiving)
                elif silent_s > receiving.stall_s:
                    receiving.heard_at = now
                    receiving.stall_s = min(STALL_MAX_S, 2 * receiving.stall_s)
                    self.send_nack(receiving, stalled=True)
                elif silent_s > IDLE_S and receiving.incoming.nack_is_due(idle=True):
                    self.send_nack(receiving)

    def on_reconnect(self) -> None:
        """The link came back: chunks in flight are lost."""
        with self._lock:
            for receiving in self.transfers.values():
                receiving.heard_at = time.monotonic()
                receiving.stall_s = STALL_S
                if receiving.listening and not receiving.committing:
                    self.send_nack(receiving, stalled=True)


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
