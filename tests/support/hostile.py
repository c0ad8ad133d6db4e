"""A hostile peer: raw bytes to any topic, and blobs as a correct peer serves them."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.transport.base import Received, Transport
from fedvit.transport.chunk_sender import ChunkTopics
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import BlobAck, BlobNack, decode
from tests.support.waiting import wait_until


class Peer:
    """Sends raw bytes, to `topic` by default, and serves blobs as a correct peer would.

    `subscribed` are the topics that it receives; `upload_topic` gives the topic of a blob's chunks.
    """

    def __init__(
        self, transport: Transport, folder: Path, *subscribed: str, topic: str, upload_topic: Callable[[str], str]
    ) -> None:
        self.blobs = BlobStore(folder)
        self.transport = transport
        self.topic = topic
        self.exchange = BlobExchange(
            self.transport,
            self.blobs,
            send=lambda peer, message: None,
            topics=ChunkTopics(upload_topic),
            may_read=lambda peer, digest: True,
        )
        for name in subscribed:
            self.transport.subscribe(name, 1)
        self.transport.open()

    def send(self, raw: bytes, topic: str = "") -> None:
        with suppress(BadPayload):  # larger than a broker accepts
            self.transport.publish(topic or self.topic, raw)

    def receive(self) -> list[Any]:
        """Return the messages since the last call."""
        news: list[Any] = []
        while True:
            try:
                event = self.transport.inbox.get_nowait()
            except Empty:
                break
            if isinstance(event, Received) and "/b/" not in event.topic:
                message = decode(event.payload)
                news.append(message)
                with suppress(BadPayload):
                    if isinstance(message, BlobNack):
                        self.exchange.on_nack("peer", message)
                    elif isinstance(message, BlobAck):
                        self.exchange.on_ack("peer", message)
        self.exchange.tick()
        return news

    def wait_for(self, kind: type, matches: Callable[[Any], bool] = lambda message: True) -> Any:
        """Wait for a message of this type."""
        messages: list[Any] = []

        def find() -> list[Any]:
            messages.extend(self.receive())
            return [message for message in messages if isinstance(message, kind) and matches(message)]

        return wait_until(find, f"no {kind.__name__} came")[0]
