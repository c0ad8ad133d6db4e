"""A hostile peer."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, FedvitError
from fedvit.transport.base import Received, Transport
from fedvit.transport.exchange import BlobExchange
from fedvit.wire.messages import BlobAck, BlobNack, decode

HANG_S = 30.0
"""Longest time for a batch of messages, which should take milliseconds."""

SLOW_S = 5.0
"""Longest processor time of a message, or of a batch of messages: other processes of a busy machine do not count."""


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
            topic_for=upload_topic,
            may_read=lambda peer, digest: True,
        )
        for name in subscribed:
            self.transport.subscribe(name, 1)
        self.transport.open()

    def send(self, raw: bytes, topic: str = "") -> None:
        with suppress(BadPayload):  # larger than a broker accepts
            self.transport.publish(topic or self.topic, raw)

    def receive(self) -> list[Any]:
        """The messages since the last call."""
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

    def wait_for(self, kind: type, what: str, matches: Callable[[Any], bool] = lambda message: True) -> Any:
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            for message in self.receive():
                if isinstance(message, kind) and matches(message):
                    return message
            time.sleep(0.002)
        raise FedvitError(f"waited {HANG_S:.0f} s for {what}")
