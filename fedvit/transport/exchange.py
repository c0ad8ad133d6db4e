"""Move blobs over a transport: one object for both directions.

`chunk_sender` sends chunks, `blob_receiver` writes those that arrive, `url_transfers` moves blobs through an object
store. The program passes on every BlobNack, BlobAck and UseDedicatedTopic, and every chunk from its inbox, and
calls `tick` often.

If the transport has a thread, chunks are handled there: they go from the socket into the file and never wait in the
inbox, however slow the program's loop is. `finished` is always called in the program's loop.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError
from fedvit.transport.base import Transport
from fedvit.transport.blob_places import BlobPlaces
from fedvit.transport.blob_receiver import BlobReceiver, Finished
from fedvit.transport.chunk_sender import ChunkSender, ChunkTopics
from fedvit.transport.url_transfers import Route, UrlReceiver, UrlSender
from fedvit.transport.urls import is_at
from fedvit.wire.messages import BlobAck, BlobNack, BlobUrl, Manifest, TransferMessage

log = logging.getLogger(__name__)


class BlobExchange:
    """Fetches blobs into a store and serves them from it.

    `send(peer, message)` sends a control message. `may_read(peer, digest)` says whether a peer may fetch a blob: the
    store also holds uploads of other devices. `places` is the object store of the side that has one. The other side
    sets `store_origin` to what was announced to it: URLs of other hosts are refused.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        send: Callable[[str, TransferMessage], None],
        topics: ChunkTopics,
        may_read: Callable[[str, str], bool],
        places: BlobPlaces | None = None,
    ) -> None:
        self._blobs = blobs
        self._send = send
        self._may_read = may_read
        self._places = places
        self._lock = threading.RLock()  # chunks come in the transport's thread
        self._route = Route()
        self._receiver = BlobReceiver(transport, blobs, lock=self._lock, send=send)
        self._url_receiver = UrlReceiver(self._receiver, lock=self._lock, route=self._route, places=places)
        self._url_sender = UrlSender(blobs, lock=self._lock, send=send, route=self._route)
        self._chunks = ChunkSender(transport, blobs, lock=self._lock, send=send, topics=topics)
        self.heard = self._receiver.heard
        self.take_progress = self._receiver.take_progress
        self.on_use_dedicated_topic = self._receiver.on_use_dedicated_topic
        self.on_reconnect = self._receiver.on_reconnect
        self.on_url = self._url_receiver.on_url
        self.on_put = self._url_receiver.on_put

    @property
    def store_origin(self) -> str:
        """Origin of the store that was announced to this side."""
        return self._route.origin

    @store_origin.setter
    def store_origin(self, origin: str) -> None:
        self._route.origin = origin

    @property
    def is_busy(self) -> bool:
        """True while a transfer needs `tick`."""
        return bool(self._receiver.transfers or self._chunks or self._receiver.ended)

    def under_way(self) -> tuple[int, int]:
        """Numbers of blobs that are being received and sent. May be called from any thread."""
        return len(self._receiver.transfers), len(self._chunks)

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished, dedicated_topic: str = "") -> None:
        """Receive a blob from `sender` (`BlobReceiver.fetch`)."""
        self._receiver.fetch(manifest, sender, topic, finished, dedicated_topic)

    def cancel(self, sender: str | None = None) -> None:
        """Stop receiving from one sender, or from all, without a message. Received chunks are kept."""
        with self._lock:
            if sender is None:
                self._url_sender.putting.clear()
            self._receiver.cancel(sender)

    def on_nack(self, peer: str, nack: BlobNack) -> None:
        """A receiver reports missing chunks. Raises BadPayload for a blob that it may not fetch and for invalid chunks,
        StorageFailed when the blob cannot be read."""
        if not self._may_read(peer, nack.digest):
            raise BadPayload("FV2302", f"{peer} asks for blob {nack.digest}, which it was not offered")
        if nack.put and is_at(nack.put.url, self._route.origin) and not self._route.is_blocked():
            self._url_sender.put(peer, nack.digest, nack.put)
        elif nack.url and self._places and not self._chunks.sends_to(peer, nack.digest):
            if nack.url != "used":
                manifest, failed = self._blobs.manifest(nack.digest), nack.url == "failed"
                if self._places.takes(manifest):
                    self._places.locate(peer, manifest, partial(self._send_located, peer, nack), failed=failed)
                else:
                    self._chunks.send(peer, nack)
        else:
            self._chunks.send(peer, nack)

    def _send_located(self, peer: str, nack: BlobNack, url: str | None) -> None:
        """Send the URL of a blob, or its chunks if there is none. Runs in any thread."""
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
        incoming = self._receiver.find_manifest(digest)
        if incoming is None and not self._blobs.has(digest):
            return False
        manifest = incoming or self._blobs.manifest(digest)
        return self._places.takes(manifest) and self._places.is_awaited(manifest)

    def on_ack(self, peer: str, ack: BlobAck) -> None:
        with self._lock:
            self._url_sender.putting.discard(ack.digest)
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

    def tick(self) -> None:
        """Send due chunks, report finished transfers, and send nacks after silence. Call a few times per second."""
        with self._lock:
            now = time.monotonic()
            self._chunks.tick(now)
            self._receiver.tick(now)
        self._receiver.report_ended()
