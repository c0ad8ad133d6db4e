"""Moving blobs over a transport: one object for both directions.

`fedvit.wire.transfer` and `outgoing` decide what is sent when; this module reads files, sends chunks and writes those
that arrive. The program passes on every BlobNack, BlobAck and UseDedicatedTopic, and every chunk from its inbox, and
calls `tick` often.

If the transport has a thread, chunks are handled there: they go from the socket into the file and never wait in the
inbox, however slow the program's loop is. `finished` is always called in the program's loop.
"""

import logging
import mmap
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
from fedvit.wire.messages import BlobAck, BlobNack, Manifest, UseDedicatedTopic
from fedvit.wire.outgoing import Outgoing
from fedvit.wire.transfer import DEDICATED_WINDOW_CHUNKS, WINDOW_CHUNKS, Chunk, Incoming, decode_chunk

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Silence after which a receiver reports chunks in flight as lost; doubles up to STALL_MAX_S."""
STALL_MAX_S = 30.0
IDLE_S = 0.3
"""Silence after which a receiver sends a nack, in case the last chunks of a burst were lost."""
GATHER_S = 0.2
"""Longest wait, before the first chunk, for the other receivers that are expected to ask for the same blob."""
FRESH_S = 0.5
"""A chunk sent within this time counts as in flight, even if a receiver reports it as lost."""
SILENT_S = 2 * STALL_MAX_S
"""After this silence a receiver no longer delays the others; it may ask again."""
LAGGARD_S = 5.0
"""A receiver that alone delays the others for this time is moved to a dedicated topic."""
SEND_BUFFER_BYTES = 8 * 1024 * 1024
CREDIT_CHUNKS = 2 * WINDOW_CHUNKS
"""Chunks of all blobs together, except on dedicated topics, that one sender may have in flight: 16 MiB in the broker at
most. Each blob may have the window of a dedicated topic in flight nevertheless, so that a receiver that asks for much
and falls silent does not block others."""
MAX_RESTARTS = 3
LARGE_BYTES = 1 << 20
"""Blobs from this size on are hashed and synced in a separate thread, without blocking other transfers."""
_committer = ThreadPoolExecutor(1, thread_name_prefix="blob-commit")  # its thread starts with the first large blob

Finished = Callable[[Manifest, Exception | None], None]


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


class _Sending:
    def __init__(self, manifest: Manifest, topic: str, content: bytes | mmap.mmap, receivers: int, window: int) -> None:
        self.outgoing = Outgoing(manifest, window)
        self.topic = topic
        self.content = memoryview(content)
        self.receivers = receivers
        self.starts_at = time.monotonic() + GATHER_S
        self.sent_at = -FRESH_S
        self.window = window
        self.heard_at: dict[str, float] = {}  # receiver -> its last BlobNack
        self.lags_since: dict[str, float] = {}

    def heard(self, peer: str, nack: BlobNack) -> None:
        """Note a BlobNack. Raises BadPayload when it asks for chunks that do not exist."""
        now = time.monotonic()
        if nack.stalled and now - self.sent_at < FRESH_S:
            # the nack was sent before the last chunks arrived, or, if this side was busy, even before they were sent
            nack = msgspec.structs.replace(nack, stalled=False)
        self.outgoing.update(peer, nack)
        self.heard_at[peer] = now
        if self.outgoing.receiver_count >= self.receivers:
            self.starts_at = now

    def drop(self, peer: str) -> None:
        self.outgoing.drop(peer)
        self.heard_at.pop(peer, None)
        self.lags_since.pop(peer, None)

    def laggards(self, now: float) -> list[str]:
        """Receivers that have delayed the others for long; each is returned once in LAGGARD_S."""
        slow = self.outgoing.held_up_by()
        self.lags_since = {peer: self.lags_since.get(peer, now) for peer in slow}
        long = [peer for peer, since in self.lags_since.items() if now - since >= LAGGARD_S]
        for peer in long:
            self.lags_since[peer] = now
        return long


class BlobExchange:
    """Fetches blobs into a store and serves them from it.

    `send(peer, message)` sends a control message. `topic_for(digest)` is the topic on which this side
    sends a blob's chunks, `dedicated_topic_for(peer, digest)` that for one receiver which cannot keep up with the
    others. `may_read(peer, digest)` says whether a peer may fetch a blob: the store also holds uploads of
    other devices. `receivers(digest)` is how many peers are expected to ask for a blob now, so that it is
    sent once to all of them.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        send: Callable[[str, BlobNack | BlobAck | UseDedicatedTopic], None],
        topic_for: Callable[[str], str],
        may_read: Callable[[str, str], bool],
        receivers: Callable[[str], int] = lambda digest: 1,
        dedicated_topic_for: Callable[[str, str], str] | None = None,
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._send = send
        self._topic_for = topic_for
        self._may_read = may_read
        self._receivers = receivers
        self._dedicated_topic_for = dedicated_topic_for
        self._lock = threading.RLock()  # chunks come in the transport's thread
        # by (digest, topic): several senders may send the same blob, independently
        self._receiving: dict[tuple[str, str], _Receiving] = {}
        self._ended: list[_Receiving] = []
        self._sending: dict[tuple[str, str], _Sending] = {}  # by (digest, receiver of the dedicated topic or "")

    def under_way(self) -> tuple[int, int]:
        """Numbers of blobs that are being received and sent. May be called from any thread."""
        return len(self._receiving), len(self._sending)

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
                fresh = receiving.incoming.accept(chunk)
            except BadPayload as error:
                log.warning("chunk dropped", extra={"reason": str(error)})
                return
            receiving.heard_at = time.monotonic()
            if fresh:
                receiving.progress_at = receiving.heard_at
                receiving.new_bytes += len(chunk.payload)
            if not in_sequence:  # a chunk in sequence: the silence before it lost nothing, the link is only slow
                receiving.stall_s = STALL_S
            try:
                if fresh:
                    receiving.partial.write(chunk.index, chunk.payload)
            except StorageFailed as error:
                self._end(receiving, error)
                return
            if receiving.incoming.complete:
                self._complete(receiving)
            elif receiving.incoming.nack_is_due():
                self._send_nack(receiving)

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
        self._send(receiving.sender, receiving.incoming.nack(stalled=stalled, apart=receiving.dedicated))

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
            receiving = next(
                (
                    one
                    for (digest, _), one in self._receiving.items()
                    if (digest, one.sender) == (dedicated.digest, sender)
                ),
                None,
            )
            if receiving is None or receiving.dedicated or receiving.committing or not receiving.dedicated_topic:
                return
            self._transport.stop_listening(receiving.topic)
            del self._receiving[dedicated.digest, receiving.topic]
            receiving.dedicated, receiving.topic, receiving.listening = True, receiving.dedicated_topic, False
            self._receiving[dedicated.digest, receiving.topic] = receiving
            receiving.incoming.switch_topic()
            self._transport.listen(receiving.dedicated_topic, self)

    # --- sending --------------------------------------------------------------------------------------

    def on_nack(self, peer: str, nack: BlobNack) -> None:
        """A receiver reports missing chunks. Raises BadPayload for a blob that it may not fetch and for invalid chunks,
        StorageFailed when the blob cannot be read."""
        if not self._may_read(peer, nack.digest):
            raise BadPayload(f"{peer} asks for blob {nack.digest}, which it was not offered")
        dedicated = nack.apart and self._dedicated_topic_for is not None
        key = (nack.digest, peer if dedicated else "")
        with self._lock:
            if key not in self._sending:
                self._sending[key] = self._new_sending(peer, nack.digest, dedicated=dedicated)
            if dedicated and (group := self._sending.get((nack.digest, ""))):
                group.drop(peer)
            sending = self._sending[key]
            sending.heard(peer, nack)
            self._pump(sending)

    def _new_sending(self, peer: str, digest: str, *, dedicated: bool) -> _Sending:
        manifest = self._blobs.manifest(digest)
        content = self._content(manifest)
        if dedicated and self._dedicated_topic_for is not None:
            return _Sending(manifest, self._dedicated_topic_for(peer, digest), content, 1, DEDICATED_WINDOW_CHUNKS)
        return _Sending(manifest, self._topic_for(digest), content, self._receivers(digest), WINDOW_CHUNKS)

    def _content(self, manifest: Manifest) -> bytes | mmap.mmap:
        """Small blobs are read, as a mapped file stays open; blobs made for one device are often small."""
        path = self._blobs.path(manifest.digest)
        try:
            if manifest.chunks == 1:
                return self._blobs.get(manifest.digest)
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise storage_failed(f"cannot read {path}", error) from error

    def on_ack(self, peer: str, ack: BlobAck) -> None:
        with self._lock:
            for key in ((ack.digest, ""), (ack.digest, peer)):
                if sending := self._sending.get(key):
                    sending.drop(peer)
                    self._forget_if_idle(key, sending)

    def stop_sending(self, digest: str) -> None:
        """Stop sending a blob whose file is replaced; receivers ask again, and get the new file."""
        with self._lock:
            for key in [key for key in self._sending if key[0] == digest]:
                del self._sending[key]

    def drop_peer(self, peer: str) -> None:
        """Forget a peer that is gone."""
        with self._lock:
            for key, sending in list(self._sending.items()):
                sending.drop(peer)
                self._forget_if_idle(key, sending)
            self.cancel(peer)

    def _forget_if_idle(self, key: tuple[str, str], sending: _Sending) -> None:
        if not sending.outgoing.receiver_count:
            del self._sending[key]  # the file stays mapped until the last chunk is sent

    def _pump(self, sending: _Sending) -> None:
        if time.monotonic() < sending.starts_at or not sending.outgoing.has_work or not self._transport.bulk_up():
            return  # Wake arrives when the link is up
        credit, room = self._credit(sending), SEND_BUFFER_BYTES - self._transport.pending_bytes()
        manifest, messages = sending.outgoing.manifest, []
        while sending.outgoing.under_way < credit and room > 0 and (step := sending.outgoing.next_chunk()):
            index, seq = step
            payload = sending.content[index * manifest.chunk : (index + 1) * manifest.chunk]
            head = Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, payload).head()
            messages.append((head, payload))
            room -= len(payload)
        # if the link goes down now, receivers ask again later
        if messages and self._transport.send_bulk(sending.topic, messages):
            sending.sent_at = time.monotonic()

    def _credit(self, sending: _Sending) -> int:
        """How many chunks of a blob may be in flight, given those of other blobs; dedicated topics do not count."""
        if sending.window == DEDICATED_WINDOW_CHUNKS:
            return DEDICATED_WINDOW_CHUNKS
        others = (
            other
            for (_, dedicated_topic), other in self._sending.items()
            if not dedicated_topic and other is not sending
        )
        return max(DEDICATED_WINDOW_CHUNKS, CREDIT_CHUNKS - sum(other.outgoing.under_way for other in others))

    # --- time -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send due chunks, report finished transfers, and send nacks after silence. Call a few times per second."""
        with self._lock:
            now = time.monotonic()
            self._serve(now)
            for receiving in list(self._receiving.values()):
                silent_s = now - receiving.heard_at
                if receiving.committing or not receiving.listening:
                    continue  # nothing is missing, or the subscription is not confirmed yet
                if silent_s > receiving.stall_s:
                    receiving.heard_at = now
                    receiving.stall_s = min(STALL_MAX_S, 2 * receiving.stall_s)
                    self._send_nack(receiving, stalled=True)
                elif silent_s > IDLE_S and receiving.incoming.nack_is_due(idle=True):
                    self._send_nack(receiving)
        self._report_ended()

    def _serve(self, now: float) -> None:
        for key, sending in list(self._sending.items()):
            for peer, heard_at in list(sending.heard_at.items()):
                if now - heard_at > SILENT_S:
                    sending.drop(peer)
            if self._dedicated_topic_for is not None:
                for peer in sending.laggards(now):
                    log.info("slow receiver moved to a dedicated topic", extra={"peer": peer, "digest": key[0]})
                    self._send(peer, UseDedicatedTopic(key[0]))
            self._pump(sending)
            self._forget_if_idle(key, sending)

    def reconnected(self) -> None:
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
