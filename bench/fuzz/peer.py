"""The hostile side of one conversation."""

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
"""For a batch of messages that take milliseconds."""


class Peer:
    """The hostile side of one conversation: speaks raw bytes, and serves blobs as an honest one would."""

    def __init__(self, transport: Transport, folder: Path, *hears: str, sends: Callable[[str], str]) -> None:
        self.blobs = BlobStore(folder)
        self.transport = transport
        self.talks_on = ""
        self.heard: dict[type, Any] = {}  # the newest message of each type
        self.exchange = BlobExchange(
            self.transport,
            self.blobs,
            send=lambda peer, message: None,
            topic_for=sends,
            may_read=lambda peer, digest: True,
        )
        for topic in hears:
            self.transport.subscribe(topic, 1)
        self.transport.open()

    def say(self, raw: bytes, topic: str = "") -> None:
        with suppress(BadPayload):  # larger than any broker lets through
            self.transport.publish(topic or self.talks_on, raw)

    def listen(self) -> list[Any]:
        """What came since the last time."""
        news: list[Any] = []
        while True:
            try:
                event = self.transport.inbox.get_nowait()
            except Empty:
                break
            if isinstance(event, Received) and "/b/" not in event.topic:
                message = decode(event.payload)
                news.append(message)
                self.heard[type(message)] = message
                with suppress(BadPayload):
                    if isinstance(message, BlobNack):
                        self.exchange.on_nack("peer", message)
                    elif isinstance(message, BlobAck):
                        self.exchange.on_ack("peer", message)
        self.exchange.tick()
        return news

    def wait_for(self, kind: type, what: str, after: Callable[[Any], bool] = lambda message: True) -> Any:
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            for message in self.listen():
                if isinstance(message, kind) and after(message):
                    return message
            time.sleep(0.002)
        raise FedvitError(f"waited {HANG_S:.0f} s for {what}")
