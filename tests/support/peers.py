"""Programs reduced to their exchange of blobs, for the contracts of blobs."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

from coordinator.rounds.object_store import ObjectStore
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.transport.base import Connected, Disconnected, Received, Transport
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import (
    AnyMessage,
    BlobAck,
    BlobNack,
    BlobPut,
    BlobUrl,
    Manifest,
    TransferMessage,
    UseDedicatedTopic,
    decode,
    encode,
)
from fedvit.wire.topics import blob_level
from fedvit.wire.transfer import CHUNK_BYTES
from tests.support.waiting import wait_until


class Peer:
    """A program reduced to its exchange: control on ctl/RECEIVER/SENDER, chunks on data/SENDER/BLOB."""

    def __init__(
        self, prefix: str, name: str, transport: Transport, folder: Path, places: ObjectStore | None = None
    ) -> None:
        self.name = name
        self.transport = transport
        self.blobs = BlobStore(folder / name)
        self.finished: list[tuple[Manifest, Exception | None]] = []
        self.refused: list[str] = []
        self.urls: list[str] = []
        self.change: Callable[[AnyMessage], AnyMessage | None] = lambda message: message  # None: it is lost
        self.readable = True
        self.receivers = 4  # more than there are: the wait for them ends by time
        self.events_per_step = 1_000_000
        self._prefix = prefix
        self.connected = False
        self.disconnections = 0
        self._ticked_at = 0.0
        self.exchange = BlobExchange(
            transport,
            self.blobs,
            send=self._send,
            topics=ChunkTopics(self.data_topic, lambda digest: self.receivers, self.dedicated_topic),
            may_read=lambda peer, digest: self.readable,
            places=places,
        )
        transport.subscribe(f"{prefix}ctl/{name}/+", 1)
        transport.open()

    def data_topic(self, digest: str, sender: str = "") -> str:
        return f"{self._prefix}data/{sender or self.name}/{blob_level(digest)}"

    def dedicated_topic(self, peer: str, digest: str) -> str:
        return f"{self._prefix}lane/{peer}/{blob_level(digest)}"

    def fetch(self, manifest: Manifest, sender: "Peer") -> None:
        self.fetch_from(sender.name, manifest)

    def fetch_from(self, sender: str, manifest: Manifest) -> None:
        def finish(*ended: Any) -> None:
            self.finished.append(ended)

        data, dedicated = self.data_topic(manifest.digest, sender), self.dedicated_topic(self.name, manifest.digest)
        self.exchange.fetch(manifest, sender, data, finish, dedicated)

    @property
    def has_ended(self) -> bool:
        return bool(self.finished)

    def got(self, content: bytes) -> bool:
        """Whether exactly this one blob came, whole and without an error."""
        [(manifest, error)] = self.finished
        return error is None and self.blobs.get(manifest.digest) == content

    @property
    def sent_chunks(self) -> float:
        return self.transport.sent_bytes / CHUNK_BYTES

    def step(self, wait_s: float = 0.0) -> bool:
        """Handle what came and let time pass; False when nothing came, after a wait for it."""
        busy = False
        for _ in range(self.events_per_step):
            try:
                event = self.transport.inbox.get(timeout=0.0 if busy else wait_s)
            except Empty:
                break
            busy = True
            match event:
                case Disconnected():
                    self.disconnections += 1
                case Connected():
                    self.connected = True
                    self.exchange.on_reconnect()
                case Received(topic, payload) if topic.startswith(f"{self._prefix}ctl/"):
                    self._on_control(topic.rsplit("/", 1)[1], payload)
                case Received(topic, payload):
                    self.exchange.heard(topic, payload)
        if busy or time.monotonic() - self._ticked_at > 0.05:
            self._ticked_at = time.monotonic()
            self.exchange.tick()
        return busy

    def _on_control(self, sender: str, payload: bytes) -> None:
        message = self.change(decode(payload))
        try:
            match message:
                case BlobUrl():
                    self.urls.append(message.url)
                    self.exchange.on_url(sender, message)
                case BlobPut():
                    self.exchange.on_put(sender, message)
                case BlobNack():
                    self.exchange.on_nack(sender, message)
                case BlobAck():
                    self.exchange.on_ack(sender, message)
                case UseDedicatedTopic():
                    self.exchange.on_use_dedicated_topic(sender, message)
        except BadPayload as error:
            self.refused.append(str(error))

    def _send(self, peer: str, message: TransferMessage) -> None:
        self.transport.publish(f"{self._prefix}ctl/{peer}/{self.name}", encode(message))

    def chunks_here(self, manifest: Manifest) -> int:
        """Of a blob on its way; all, when it has come."""
        if self.blobs.has(manifest.digest):
            return manifest.chunks
        transfers = self.exchange._receiver.transfers
        [receiving] = [one for (digest, _), one in transfers.items() if digest == manifest.digest]
        return sum(receiving.partial.have)

    def partial_files(self) -> list[Path]:
        return list(self.blobs.folder.rglob("*.part"))


def drive(peers: list[Peer], until: Callable[[], bool]) -> None:
    """Run all peers in this thread."""

    def all_step() -> None:
        busy = [peer.step() for peer in peers]
        if not any(busy):
            time.sleep(0.001)

    wait_until(until, pause_s=0.0, meanwhile=all_step)


def settle(peers: list[Peer]) -> None:
    """Connect everybody."""
    drive(peers, lambda: all(peer.connected for peer in peers))


def blob(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)
