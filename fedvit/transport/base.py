"""The transport: publish and subscribe, events into one inbox. Nothing is promised beyond "usually arrives".

Every program has one thread that reads the inbox; whatever arrives, from the network or from its own
worker threads, becomes an event there. So no program state needs a lock.
"""

from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import NamedTuple


class Received(NamedTuple):
    topic: str
    payload: bytes


class Connected(NamedTuple):
    """The link is up; subscriptions are in place again."""


class Disconnected(NamedTuple):
    """The link is down; the transport goes on trying by itself."""

    reason: str


class Will(NamedTuple):
    """What the broker publishes when this side vanishes without a farewell."""

    topic: str
    payload: bytes
    retain: bool


class Transport(ABC):
    """One connection of one program.

    All methods may be called from any thread and never block on the network. `sent_bytes` and
    `received_bytes` count payloads since construction.
    """

    def __init__(self, inbox: SimpleQueue[object]) -> None:
        self.inbox = inbox
        self.sent_bytes = 0
        self.received_bytes = 0

    @abstractmethod
    def open(self, will: Will | None = None) -> None:
        """Begin to connect; Connected arrives in the inbox each time the link comes up."""

    @abstractmethod
    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Hear a topic filter from now on, also after reconnecting."""

    @abstractmethod
    def unsubscribe(self, topic_filter: str) -> None: ...

    @abstractmethod
    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> bool:
        """Hand a message over. False while the link is down: then nothing was queued."""

    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes handed over that have not left this process yet; bulk senders wait while it is high."""

    @abstractmethod
    def close(self) -> None:
        """Leave for good, without the last will."""
