"""Moving blobs over a transport: one object for both directions, driven by its program's loop.

What to send when is decided by `fedvit.wire.transfer`; this room only reads files, publishes chunks and
writes what arrives. The program passes on every chunk, Want and Done, and calls `tick` often.
"""

import logging
import mmap
import time
from collections.abc import Callable

import msgspec

from fedvit.blobs import BlobStore, PartialBlob
from fedvit.errors import BadPayload, StorageFailed
from fedvit.files import storage_failed
from fedvit.transport.base import Transport
from fedvit.wire.messages import Done, Manifest, Want
from fedvit.wire.transfer import Chunk, Incoming, Outgoing, decode_chunk

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Silence after which a receiver says that what was under way is lost; doubles up to STALL_MAX_S."""
STALL_MAX_S = 30.0
IDLE_S = 0.3
"""Silence after which a receiver says what it has, in case the last chunks of a burst were lost."""
GATHER_S = 0.2
"""Longest wait, before the first chunk, for the other receivers that are expected to ask for the same blob."""
FRESH_S = 0.5
"""A chunk that was sent so recently is under way, whatever a receiver says."""
SILENT_S = 2 * STALL_MAX_S
"""A receiver that said nothing for so long no longer holds up the others; it may ask again."""
SEND_BUFFER_BYTES = 8 * 1024 * 1024
MAX_RESTARTS = 3

Finished = Callable[[Manifest, Exception | None], None]


class _Receiving:
    def __init__(self, manifest: Manifest, partial: PartialBlob, sender: str, topic: str, finished: Finished) -> None:
        self.incoming = Incoming(manifest)
        self.partial = partial
        self.sender = sender
        self.topic = topic
        self.finished = [finished]
        self.heard_at = time.monotonic()
        self.stall_s = STALL_S
        self.restarts = 0


class _Sending:
    def __init__(self, manifest: Manifest, topic: str, content: mmap.mmap, receivers: int) -> None:
        self.outgoing = Outgoing(manifest)
        self.topic = topic
        self.content = content
        self.receivers = receivers
        self.starts_at = time.monotonic() + GATHER_S
        self.sent_at = -FRESH_S
        self.heard_at: dict[str, float] = {}  # receiver -> its last Want

    def heard(self, peer: str, want: Want) -> None:
        """Note a Want. Raises BadPayload when it asks for chunks that do not exist."""
        now = time.monotonic()
        if want.stalled and now - self.sent_at < FRESH_S:
            # it was said before the last chunks arrived; when this side was busy, even before they were sent
            want = msgspec.structs.replace(want, stalled=False)
        self.outgoing.update(peer, want)
        self.heard_at[peer] = now
        if len(self.outgoing.takers) >= self.receivers:
            self.starts_at = now

    def drop(self, peer: str) -> None:
        self.outgoing.drop(peer)
        self.heard_at.pop(peer, None)


class BlobExchange:
    """Fetches blobs into a store and serves them from it.

    `tell(peer, message)` sends a control message. `topic_for(digest)` is the topic on which this side
    sends a blob's chunks. `may_read(peer, digest)` says whether a peer may have a blob: the store holds
    what other devices sent, too. `receivers(digest)` is how many peers will ask for a blob about now, so
    that it is sent once to all of them.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        tell: Callable[[str, Want | Done], None],
        topic_for: Callable[[str], str],
        may_read: Callable[[str, str], bool],
        receivers: Callable[[str], int] = lambda digest: 1,
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._tell = tell
        self._topic_for = topic_for
        self._may_read = may_read
        self._receivers = receivers
        self._receiving: dict[str, _Receiving] = {}
        self._sending: dict[str, _Sending] = {}

    # --- receiving ------------------------------------------------------------------------------------

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished) -> None:
        """Receive a blob from `sender`, whose chunks come on `topic`; `finished(manifest, error)` ends it.

        A blob that is already here is finished at once, without a message.
        """
        if self._blobs.has(manifest.digest):
            self._tell(sender, Done(manifest.digest))
            finished(manifest, None)
            return
        if running := self._receiving.get(manifest.digest):
            running.finished.append(finished)
            return
        try:
            partial = self._blobs.receive(manifest)
        except StorageFailed as error:
            finished(manifest, error)
            return
        receiving = _Receiving(manifest, partial, sender, topic, finished)
        self._receiving[manifest.digest] = receiving
        self._transport.subscribe(topic, 0)
        self._tell(sender, receiving.incoming.want())

    def on_chunk(self, raw: bytes) -> None:
        """Store a chunk that arrived; anything unknown or damaged is dropped and asked for again later."""
        try:
            chunk = decode_chunk(raw)
            receiving = self._receiving.get(chunk.digest)
            if receiving is None:
                return
            in_sequence = chunk.seq == receiving.incoming.last_seq + 1
            fresh = receiving.incoming.accept(chunk)
        except BadPayload as error:
            log.warning("chunk dropped", extra={"reason": str(error)})
            return
        receiving.heard_at = time.monotonic()
        if not in_sequence:  # else a silence before it lost nothing: the link only needs more patience
            receiving.stall_s = STALL_S
        try:
            if fresh:
                receiving.partial.write(chunk.index, chunk.payload)
        except StorageFailed as error:
            self._end(receiving, error)
            return
        if receiving.incoming.complete:
            self._complete(receiving)
        elif receiving.incoming.want_is_due():
            self._tell(receiving.sender, receiving.incoming.want())

    def _complete(self, receiving: _Receiving) -> None:
        try:
            receiving.partial.commit()
        except BadPayload as error:
            receiving.restarts += 1
            if receiving.restarts > MAX_RESTARTS:
                self._end(receiving, error)
                return
            log.warning("blob fetched again", extra={"reason": str(error)})
            receiving.incoming.restart()
            self._tell(receiving.sender, receiving.incoming.want(stalled=True))
        except OSError as error:
            self._end(receiving, storage_failed("cannot keep a received blob", error))
        else:
            self._end(receiving, None)

    def _end(self, receiving: _Receiving, error: Exception | None) -> None:
        manifest = receiving.incoming.manifest
        if error is not None:
            receiving.partial.abandon()
        del self._receiving[manifest.digest]
        self._transport.unsubscribe(receiving.topic)
        self._tell(receiving.sender, Done(manifest.digest))
        for finished in receiving.finished:
            finished(manifest, error)

    def cancel(self, sender: str | None = None) -> None:
        """Stop receiving from one sender, or from all; nobody is told."""
        for digest, receiving in list(self._receiving.items()):
            if sender in (None, receiving.sender):
                receiving.partial.abandon()
                self._transport.unsubscribe(receiving.topic)
                del self._receiving[digest]

    # --- sending --------------------------------------------------------------------------------------

    def on_want(self, peer: str, want: Want) -> None:
        """A receiver says what it misses. Raises BadPayload when it may not have it or asks for nonsense."""
        if not self._may_read(peer, want.digest):
            raise BadPayload(f"{peer} asks for blob {want.digest}, which it was not offered")
        sending = self._sending.get(want.digest)
        if sending is None:
            manifest = self._blobs.manifest(want.digest)
            with open(self._blobs.path(want.digest), "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            sending = self._sending[want.digest] = _Sending(
                manifest, self._topic_for(want.digest), content, self._receivers(want.digest)
            )
        sending.heard(peer, want)
        self._pump(sending)

    def on_done(self, peer: str, done: Done) -> None:
        if sending := self._sending.get(done.digest):
            sending.drop(peer)
            self._forget_if_idle(done.digest, sending)

    def drop_peer(self, peer: str) -> None:
        """A receiver or sender is gone."""
        for digest, sending in list(self._sending.items()):
            sending.drop(peer)
            self._forget_if_idle(digest, sending)
        self.cancel(peer)

    def _forget_if_idle(self, digest: str, sending: _Sending) -> None:
        if not sending.outgoing.takers:
            sending.content.close()
            del self._sending[digest]

    def _pump(self, sending: _Sending) -> None:
        manifest = sending.outgoing.manifest
        if time.monotonic() < sending.starts_at:
            return
        while self._transport.pending_bytes() < SEND_BUFFER_BYTES:
            step = sending.outgoing.next_chunk()
            if step is None:
                return
            index, seq = step
            payload = sending.content[index * manifest.chunk : (index + 1) * manifest.chunk]
            chunk = Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, payload)
            if not self._transport.publish(sending.topic, chunk.encode(), qos=0):
                return  # the link is down: receivers ask again when it is back
            sending.sent_at = time.monotonic()

    # --- time -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what may go now, and speak up about silence. Call a few times per second."""
        now = time.monotonic()
        for digest, sending in list(self._sending.items()):
            for peer, heard_at in list(sending.heard_at.items()):
                if now - heard_at > SILENT_S:
                    sending.drop(peer)
            self._pump(sending)
            self._forget_if_idle(digest, sending)
        for receiving in list(self._receiving.values()):
            silent_s = now - receiving.heard_at
            if silent_s > receiving.stall_s:
                receiving.heard_at = now
                receiving.stall_s = min(STALL_MAX_S, 2 * receiving.stall_s)
                self._tell(receiving.sender, receiving.incoming.want(stalled=True))
            elif silent_s > IDLE_S and receiving.incoming.want_is_due(idle=True):
                self._tell(receiving.sender, receiving.incoming.want())

    def reconnected(self) -> None:
        """The link came back: what was under way is lost."""
        for receiving in self._receiving.values():
            receiving.heard_at = time.monotonic()
            receiving.stall_s = STALL_S
            self._tell(receiving.sender, receiving.incoming.want(stalled=True))
