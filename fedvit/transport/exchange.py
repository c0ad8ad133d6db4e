"""Moving blobs over a transport: one object for both directions.

What to send when is decided by `fedvit.wire.transfer`; this room only reads files, sends chunks and writes
what arrives. The program passes on every Want, Done and Apart, and every chunk that lands in its inbox, and
calls `tick` often.

Chunks are taken in the transport's thread where it has one: they go from the socket into the file and never
wait in the inbox, however slow the program's loop is. `finished` is always called by the program's loop.
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
from fedvit.wire.messages import Apart, Done, Manifest, Want
from fedvit.wire.outgoing import Outgoing
from fedvit.wire.transfer import LANE_CHUNKS, WINDOW_CHUNKS, Chunk, Incoming, decode_chunk

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
LAGGARD_S = 5.0
"""A receiver that alone held up the others for so long is served apart from them."""
SEND_BUFFER_BYTES = 8 * 1024 * 1024
CREDIT_CHUNKS = 2 * WINDOW_CHUNKS
"""Of all blobs together, lanes aside, so much is under way from one sender: 16 MiB in the broker at most. Each blob may
have a lane's window under way even so: who asks for much and falls silent must not keep others from theirs."""
MAX_RESTARTS = 3
LARGE_BYTES = 1 << 20
"""A blob from this size on is hashed and synced in a thread of its own, and keeps no other transfer waiting."""
_committer = ThreadPoolExecutor(1, thread_name_prefix="blob-commit")  # its thread starts with the first large blob

Finished = Callable[[Manifest, Exception | None], None]


class _Receiving:
    def __init__(self, manifest: Manifest, partial: PartialBlob, sender: str, topic: str, finished: Finished) -> None:
        self.incoming = Incoming(manifest, partial.have)
        self.partial = partial
        self.sender = sender
        self.topic = topic
        self.lane = ""  # the topic for this receiver alone, if there is one
        self.apart = False
        self.finished = [finished]
        self.error: Exception | None = None
        self.listening = False
        self.committing = False  # in another thread: nothing else may touch its file
        self.resumed = any(partial.have)  # what the sender sent to an earlier process is lost
        self.heard_at = time.monotonic()
        self.moved_at = 0.0  # when the newest chunk came that was not here yet
        self.moved_bytes = 0  # of such chunks, since somebody asked
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
        self.heard_at: dict[str, float] = {}  # receiver -> its last Want
        self.lags_since: dict[str, float] = {}

    def heard(self, peer: str, want: Want) -> None:
        """Note a Want. Raises BadPayload when it asks for chunks that do not exist."""
        now = time.monotonic()
        if want.stalled and now - self.sent_at < FRESH_S:
            # it was said before the last chunks arrived; when this side was busy, even before they were sent
            want = msgspec.structs.replace(want, stalled=False)
        self.outgoing.update(peer, want)
        self.heard_at[peer] = now
        if self.outgoing.receiver_count >= self.receivers:
            self.starts_at = now

    def drop(self, peer: str) -> None:
        self.outgoing.drop(peer)
        self.heard_at.pop(peer, None)
        self.lags_since.pop(peer, None)

    def laggards(self, now: float) -> list[str]:
        """Receivers that have held up the others for long; each is named once in LAGGARD_S."""
        slow = self.outgoing.held_up_by()
        self.lags_since = {peer: self.lags_since.get(peer, now) for peer in slow}
        long = [peer for peer, since in self.lags_since.items() if now - since >= LAGGARD_S]
        for peer in long:
            self.lags_since[peer] = now
        return long


class BlobExchange:
    """Fetches blobs into a store and serves them from it.

    `tell(peer, message)` sends a control message. `topic_for(digest)` is the topic on which this side
    sends a blob's chunks, `lane_for(peer, digest)` that for one receiver which cannot keep up with the
    others. `may_read(peer, digest)` says whether a peer may have a blob: the store holds what other devices
    sent, too. `receivers(digest)` is how many peers will ask for a blob about now, so that it is sent once
    to all of them.
    """

    def __init__(
        self,
        transport: Transport,
        blobs: BlobStore,
        *,
        tell: Callable[[str, Want | Done | Apart], None],
        topic_for: Callable[[str], str],
        may_read: Callable[[str, str], bool],
        receivers: Callable[[str], int] = lambda digest: 1,
        lane_for: Callable[[str, str], str] | None = None,
    ) -> None:
        self._transport = transport
        self._blobs = blobs
        self._tell = tell
        self._topic_for = topic_for
        self._may_read = may_read
        self._receivers = receivers
        self._lane_for = lane_for
        self._lock = threading.RLock()  # chunks come in the transport's thread
        # (digest, topic): several may send the same blob, and none of them is to wait for another
        self._receiving: dict[tuple[str, str], _Receiving] = {}
        self._ended: list[_Receiving] = []
        self._sending: dict[tuple[str, str], _Sending] = {}  # (digest, the one receiver of a lane or "")

    # --- receiving ------------------------------------------------------------------------------------

    def fetch(self, manifest: Manifest, sender: str, topic: str, finished: Finished, lane: str = "") -> None:
        """Receive a blob from `sender`, whose chunks come on `topic`; `finished(manifest, error)` ends it.

        Chunks of an earlier attempt are not asked for again. A blob that is already here is finished at once,
        without a message. `lane` is the topic on which this receiver may be served apart from others.
        """
        if self._blobs.has(manifest.digest):
            self._tell(sender, Done(manifest.digest))
            finished(manifest, None)
            return
        with self._lock:
            digest = manifest.digest
            if running := self._receiving.get((digest, topic)) or self._receiving.get((digest, lane)):
                running.finished.append(finished)
                return
            try:
                partial = self._blobs.receive(manifest)
            except StorageFailed as error:
                failed = error
            else:
                receiving = _Receiving(manifest, partial, sender, topic, finished)
                receiving.lane = lane
                self._receiving[digest, topic] = receiving
                if receiving.incoming.complete:  # all but the end of an earlier attempt
                    self._complete(receiving)
                if self._receiving.get((digest, topic)) is receiving:
                    self._transport.listen(topic, self)
                return
        finished(manifest, failed)

    def listening(self, topic: str) -> None:
        """The broker passes on what comes on `topic` from now on: the sender may begin, or begin again."""
        with self._lock:
            for receiving in self._receiving.values():
                if receiving.topic == topic and not receiving.committing:
                    again, receiving.listening = receiving.listening or receiving.resumed, True
                    receiving.heard_at = time.monotonic()
                    self._say_want(receiving, stalled=again)

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
                receiving.moved_at = receiving.heard_at
                receiving.moved_bytes += len(chunk.payload)
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
                self._say_want(receiving)

    def _complete(self, receiving: _Receiving) -> None:
        """All of its chunks are here."""
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
            elif error is not None:  # it was cancelled meanwhile
                receiving.partial.abandon()

    def _settle(self, receiving: _Receiving, error: Exception | None) -> None:
        """It has its name, or `error` says why not. One whose digest is another one is fetched again."""
        if isinstance(error, BadPayload):
            receiving.restarts += 1
            if receiving.restarts > MAX_RESTARTS:
                self._end(receiving, error)
                return
            log.warning("blob fetched again", extra={"reason": str(error)})
            receiving.partial.restart()
            receiving.incoming.restart()
            if receiving.listening:
                self._say_want(receiving, stalled=True)
        else:
            self._end(receiving, error)

    def _say_want(self, receiving: _Receiving, *, stalled: bool = False) -> None:
        self._tell(receiving.sender, receiving.incoming.want(stalled=stalled, apart=receiving.apart))

    def _end(self, receiving: _Receiving, error: Exception | None) -> None:
        manifest = receiving.incoming.manifest
        if error is not None:
            receiving.partial.abandon()
        receiving.error = error
        del self._receiving[manifest.digest, receiving.topic]
        self._transport.stop_listening(receiving.topic)
        self._tell(receiving.sender, Done(manifest.digest))
        self._ended.append(receiving)
        self._transport.inbox.put(Wake())

    def _say_what_ended(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
        for receiving in ended:
            for finished in receiving.finished:
                finished(receiving.incoming.manifest, receiving.error)

    def cancel(self, sender: str | None = None) -> None:
        """Stop receiving from one sender, or from all; nobody is told. What came is kept for the next attempt."""
        with self._lock:
            for key, receiving in list(self._receiving.items()):
                if sender in (None, receiving.sender):
                    if not receiving.committing:
                        receiving.partial.leave()
                    self._transport.stop_listening(receiving.topic)
                    del self._receiving[key]
            self._ended = [receiving for receiving in self._ended if sender not in (None, receiving.sender)]

    def take_moved(self, sender: str) -> tuple[float, int]:
        """Bytes of what is being received from a sender that came since this was asked last, and were not here before.

        Also when the newest of them came, on the monotonic clock; 0.0 where there are none.
        """
        newest, size = 0.0, 0
        with self._lock:
            for receiving in self._receiving.values():
                if receiving.sender == sender and receiving.moved_bytes:
                    newest, size = max(newest, receiving.moved_at), size + receiving.moved_bytes
                    receiving.moved_bytes = 0
        return newest, size

    def on_apart(self, sender: str, apart: Apart) -> None:
        """The sender asks this receiver to leave the others: the rest comes on its lane."""
        with self._lock:
            receiving = next(
                (one for (digest, _), one in self._receiving.items() if (digest, one.sender) == (apart.digest, sender)),
                None,
            )
            if receiving is None or receiving.apart or receiving.committing or not receiving.lane:
                return
            self._transport.stop_listening(receiving.topic)
            del self._receiving[apart.digest, receiving.topic]
            receiving.apart, receiving.topic, receiving.listening = True, receiving.lane, False
            self._receiving[apart.digest, receiving.topic] = receiving
            receiving.incoming.moved()
            self._transport.listen(receiving.lane, self)

    # --- sending --------------------------------------------------------------------------------------

    def on_want(self, peer: str, want: Want) -> None:
        """A receiver says what it misses. Raises BadPayload when it may not have it or asks for nonsense, StorageFailed
        when the blob cannot be read."""
        if not self._may_read(peer, want.digest):
            raise BadPayload(f"{peer} asks for blob {want.digest}, which it was not offered")
        apart = want.apart and self._lane_for is not None
        key = (want.digest, peer if apart else "")
        with self._lock:
            if key not in self._sending:
                self._sending[key] = self._new_sending(peer, want.digest, apart=apart)
            if apart and (group := self._sending.get((want.digest, ""))):
                group.drop(peer)
            sending = self._sending[key]
            sending.heard(peer, want)
            self._pump(sending)

    def _new_sending(self, peer: str, digest: str, *, apart: bool) -> _Sending:
        manifest = self._blobs.manifest(digest)
        content = self._content(manifest)
        if apart and self._lane_for is not None:
            return _Sending(manifest, self._lane_for(peer, digest), content, 1, LANE_CHUNKS)
        return _Sending(manifest, self._topic_for(digest), content, self._receivers(digest), WINDOW_CHUNKS)

    def _content(self, manifest: Manifest) -> bytes | mmap.mmap:
        """A file stays open while it is mapped, so small blobs are read: what is made for each device often is."""
        path = self._blobs.path(manifest.digest)
        try:
            if manifest.chunks == 1:
                return self._blobs.get(manifest.digest)
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise storage_failed(f"cannot read {path}", error) from error

    def on_done(self, peer: str, done: Done) -> None:
        with self._lock:
            for key in ((done.digest, ""), (done.digest, peer)):
                if sending := self._sending.get(key):
                    sending.drop(peer)
                    self._forget_if_idle(key, sending)

    def stop_sending(self, digest: str) -> None:
        """The blob's file is replaced: receivers ask again, and are served with the new one."""
        with self._lock:
            for key in [key for key in self._sending if key[0] == digest]:
                del self._sending[key]

    def drop_peer(self, peer: str) -> None:
        """A receiver or sender is gone."""
        with self._lock:
            for key, sending in list(self._sending.items()):
                sending.drop(peer)
                self._forget_if_idle(key, sending)
            self.cancel(peer)

    def _forget_if_idle(self, key: tuple[str, str], sending: _Sending) -> None:
        if not sending.outgoing.receiver_count:
            del self._sending[key]  # its file stays mapped until the last chunk has left

    def _pump(self, sending: _Sending) -> None:
        if time.monotonic() < sending.starts_at or not sending.outgoing.has_work or not self._transport.bulk_up():
            return  # Wake comes when the link is up
        credit, room = self._credit(sending), SEND_BUFFER_BYTES - self._transport.pending_bytes()
        manifest, messages = sending.outgoing.manifest, []
        while sending.outgoing.under_way < credit and room > 0 and (step := sending.outgoing.next_chunk()):
            index, seq = step
            payload = sending.content[index * manifest.chunk : (index + 1) * manifest.chunk]
            head = Chunk(manifest.digest, index, manifest.chunks, manifest.size, seq, payload).head()
            messages.append((head, payload))
            room -= len(payload)
        # should the link go down just now, receivers ask again when it is back
        if messages and self._transport.send_bulk(sending.topic, messages):
            sending.sent_at = time.monotonic()

    def _credit(self, sending: _Sending) -> int:
        """How many chunks of a blob may be under way, beside those of other blobs; lanes do not count."""
        if sending.window == LANE_CHUNKS:
            return LANE_CHUNKS
        others = (other for (_, lane), other in self._sending.items() if not lane and other is not sending)
        return max(LANE_CHUNKS, CREDIT_CHUNKS - sum(other.outgoing.under_way for other in others))

    # --- time -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what may go now, say what ended, and speak up about silence. Call a few times per second."""
        with self._lock:
            now = time.monotonic()
            self._serve(now)
            for receiving in list(self._receiving.values()):
                silent_s = now - receiving.heard_at
                if receiving.committing or not receiving.listening:
                    continue  # nothing is missing any more; or it could not hear what it asks for
                if silent_s > receiving.stall_s:
                    receiving.heard_at = now
                    receiving.stall_s = min(STALL_MAX_S, 2 * receiving.stall_s)
                    self._say_want(receiving, stalled=True)
                elif silent_s > IDLE_S and receiving.incoming.want_is_due(idle=True):
                    self._say_want(receiving)
        self._say_what_ended()

    def _serve(self, now: float) -> None:
        for key, sending in list(self._sending.items()):
            for peer, heard_at in list(sending.heard_at.items()):
                if now - heard_at > SILENT_S:
                    sending.drop(peer)
            if self._lane_for is not None:
                for peer in sending.laggards(now):
                    log.info("a slow receiver is served apart", extra={"peer": peer, "digest": key[0]})
                    self._tell(peer, Apart(key[0]))
            self._pump(sending)
            self._forget_if_idle(key, sending)

    def reconnected(self) -> None:
        """The link came back: what was under way is lost."""
        with self._lock:
            for receiving in self._receiving.values():
                receiving.heard_at = time.monotonic()
                receiving.stall_s = STALL_S
                if receiving.listening and not receiving.committing:
                    self._say_want(receiving, stalled=True)


def _commit(partial: PartialBlob) -> Exception | None:
    """Why a blob cannot have its name; None: it has."""
    try:
        partial.commit()
    except BadPayload as error:
        return error
    except OSError as error:
        return storage_failed("cannot keep a received blob", error)
    except Exception as error:  # noqa: BLE001 - raised again by the program's loop
        return error
    return None
