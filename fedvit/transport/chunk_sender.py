"""Sending a blob's chunks to all receivers at once, and to a receiver that cannot keep up on a topic of its own.

`fedvit.wire.outgoing` decides which chunk is sent next; here it is read from its file and sent when the link, and the
credit of all blobs together, allow.
"""

import logging
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from fedvit.blobs import BlobStore
from fedvit.files import name_failure
from fedvit.transport.base import Transport
from fedvit.wire.messages import BlobNack, Manifest, TransferMessage, UseDedicatedTopic
from fedvit.wire.outgoing import Outgoing
from fedvit.wire.transfer import DEDICATED_WINDOW_CHUNKS, WINDOW_CHUNKS, Chunk

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""Longest wait, before the first chunk, for the other receivers that are expected to ask for the same blob."""
FRESH_S = 0.5
"""A chunk sent within this time counts as in flight, even if a receiver reports it as lost."""
WATCH_S = 0.25
"""Interval between looks at all receivers for silent ones and laggards."""
SILENT_S = 60.0
"""After this silence a receiver no longer delays the others; it may ask again. Twice the longest that one is silent by
itself (`blob_receiver.STALL_MAX_S`)."""
LAGGARD_S = 5.0
"""A receiver that alone delays the others for this time is moved to a dedicated topic."""
SEND_BUFFER_BYTES = 8 * 1024 * 1024
CREDIT_CHUNKS = 2 * WINDOW_CHUNKS
"""Chunks of all blobs together, except on dedicated topics, that one sender may have in flight: 16 MiB in the broker at
most. Each blob may have the window of a dedicated topic in flight nevertheless, so that a receiver that asks for much
and falls silent does not block others."""


class _Sending:
    def __init__(self, manifest: Manifest, topic: str, content: bytes | mmap.mmap, receivers: int, window: int) -> None:
        self.outgoing = Outgoing(manifest, window)
        self.topic = topic
        self.content = memoryview(content)
        self.receivers = receivers
        self.starts_at = time.monotonic() + GATHER_S
        self.sent_at = -FRESH_S
        self.window = window
        self.credited = 0  # chunks under way that count against the credit of all blobs together
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
        slow = self.outgoing.list_slow_receivers()
        self.lags_since = {peer: self.lags_since.get(peer, now) for peer in slow}
        long = [peer for peer, since in self.lags_since.items() if now - since >= LAGGARD_S]
        for peer in long:
            self.lags_since[peer] = now
        return long


class ChunkTopics(NamedTuple):
    """The topics on which a side sends chunks."""

    shared: Callable[[str], str]  # of a blob, given its digest
    receivers: Callable[[str], int] = lambda digest: 1
    """Peers that are expected to ask for a blob now, so that it is sent once to all of them."""
    dedicated: Callable[[str, str], str] | None = None
    """Topic of a blob for one receiver (receiver, digest), which cannot keep up with the others."""


class ChunkSender:
    """The blobs whose chunks are being sent. For the parameters see `fedvit.transport.exchange.BlobExchange`; `lock` is
    its lock, since receivers' messages come in several threads."""

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        lock: threading.RLock,
        send: Callable[[str, TransferMessage], None],
        topics: ChunkTopics,
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._lock = lock
        self._send = send
        self._topics = topics
        self._sending: dict[tuple[str, str], _Sending] = {}  # by (digest, receiver of the dedicated topic or "")
        self._of_peer: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # keys of what each receiver gets
        self._under_way = 0  # chunks of all blobs, except on dedicated topics
        self._watched_at = 0.0

    def __len__(self) -> int:
        return len(self._sending)

    def sends_to(self, peer: str, digest: str) -> bool:
        """Return whether a receiver gets chunks of this blob."""
        with self._lock:
            keys = ((digest, ""), (digest, peer))
            return any(peer in self._sending[key].heard_at for key in keys if key in self._sending)

    def send(self, peer: str, nack: BlobNack) -> None:
        dedicated = nack.apart and self._topics.dedicated is not None
        key = (nack.digest, peer if dedicated else "")
        with self._lock:
            if key not in self._sending:
                self._sending[key] = self._new(peer, nack.digest, dedicated=dedicated)
            if dedicated:
                self._drop(peer, (nack.digest, ""))
            sending = self._sending[key]
            sending.heard(peer, nack)
            self._of_peer[peer].add(key)
            self._count(sending)
            self._pump(sending)

    def _new(self, peer: str, digest: str, *, dedicated: bool) -> _Sending:
        manifest = self._blobs.manifest(digest)
        content = content_of(self._blobs, manifest)
        topics = self._topics
        if dedicated and topics.dedicated is not None:
            return _Sending(manifest, topics.dedicated(peer, digest), content, 1, DEDICATED_WINDOW_CHUNKS)
        return _Sending(manifest, topics.shared(digest), content, topics.receivers(digest), WINDOW_CHUNKS)

    def _drop(self, peer: str, key: tuple[str, str]) -> None:
        """Send nothing more of a blob to a receiver."""
        if peer in self._of_peer:
            self._of_peer[peer].discard(key)
            if not self._of_peer[peer]:
                del self._of_peer[peer]
        if sending := self._sending.get(key):
            sending.drop(peer)
            self._count(sending)

    def _forget_if_idle(self, key: tuple[str, str]) -> None:
        sending = self._sending.get(key)
        if sending and not sending.outgoing.receiver_count:
            del self._sending[key]  # the file stays mapped until the last chunk is sent

    def _count(self, sending: _Sending) -> None:
        """Update the sum of the chunks that are under way."""
        if sending.window != DEDICATED_WINDOW_CHUNKS:
            self._under_way += sending.outgoing.under_way - sending.credited
            sending.credited = sending.outgoing.under_way

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
        self._count(sending)
        # if the link goes down now, receivers ask again later
        if messages and self._transport.send_bulk(sending.topic, messages):
            sending.sent_at = time.monotonic()

    def _credit(self, sending: _Sending) -> int:
        """Count the chunks of a blob that may be in flight beside other blobs; dedicated topics do not count."""
        if sending.window == DEDICATED_WINDOW_CHUNKS:
            return DEDICATED_WINDOW_CHUNKS
        return max(DEDICATED_WINDOW_CHUNKS, CREDIT_CHUNKS - (self._under_way - sending.credited))

    def tick(self, now: float) -> None:
        """Send what is due. Call it a few times per second, with the time of `time.monotonic`."""
        if now - self._watched_at >= WATCH_S:
            self._watched_at = now
            self._watch_receivers(now)
        for sending in list(self._sending.values()):
            self._pump(sending)

    def _watch_receivers(self, now: float) -> None:
        for key, sending in list(self._sending.items()):
            for peer in [peer for peer, heard_at in sending.heard_at.items() if now - heard_at > SILENT_S]:
                self._drop(peer, key)
            if self._topics.dedicated is not None:
                for peer in sending.laggards(now):
                    log.info("slow receiver moved to a dedicated topic", extra={"peer": peer, "digest": key[0]})
                    self._send(peer, UseDedicatedTopic(key[0]))
            self._forget_if_idle(key)

    def note_receipt(self, peer: str, digest: str) -> None:
        """A receiver has the blob."""
        for key in ((digest, ""), (digest, peer)):
            self._drop(peer, key)
            self._forget_if_idle(key)

    def stop(self, digest: str) -> None:
        """Send a blob to nobody any more."""
        for key in [key for key in self._sending if key[0] == digest]:
            for peer in list(self._sending[key].heard_at):
                self._drop(peer, key)
            del self._sending[key]

    def drop_peer(self, peer: str) -> None:
        """Send nothing more to a receiver."""
        for key in list(self._of_peer.get(peer, ())):
            self._drop(peer, key)
            self._forget_if_idle(key)


def content_of(blobs: BlobStore, manifest: Manifest) -> bytes | mmap.mmap:
    """Small blobs are read, as a mapped file stays open; blobs made for one device are often small."""
    path = blobs.path(manifest.digest)
    with name_failure(f"cannot read {path}"):
        if manifest.chunks == 1:
            return blobs.get(manifest.digest)
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
