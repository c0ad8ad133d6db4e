"""The transport: publish and subscribe, events into one inbox. Delivery is not guaranteed.

Every program has one thread that reads the inbox; everything from the network or from its own worker threads arrives
there as an event. So no state of a program needs a lock.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar, NamedTuple, Protocol

from fedvit.wire.limits import BrokerLimits


class Received(NamedTuple):
    topic: str
    payload: bytes


class BulkReceived(Received):
    """A message of a topic that `Transport.listen` asked for: `Transport.admits` has no say in it."""


class Connected(NamedTuple):
    """The link is up; subscriptions are in place again. `certificate` is this side's own, as the broker accepted it."""

    certificate: Path | None = None


class Disconnected(NamedTuple):
    """The link is down; the transport keeps trying to reconnect."""

    reason: str
    refused: bool = False  # by the broker: it is there, and this client may not connect


class Acknowledged(NamedTuple):
    """The broker acknowledged a message of QoS 1; `refusal` is the reason if the broker refused it."""

    refusal: str | None


class Wake(NamedTuple):
    """Wakes the loop although no message arrived: some work can continue."""


class Will(NamedTuple):
    """The last will: published by the broker when this side disappears without disconnecting."""

    topic: str
    payload: bytes


WillMaker = Callable[[int], Will]
"""Makes the will of a connection from its number."""


class BulkSink(Protocol):
    """A receiver of bulk messages. Both methods may be called from any thread."""

    def listening(self, topic: str) -> None:
        """The subscription of `topic` is confirmed. Called again after a lost link, which loses messages."""

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        """A message arrived; a memoryview is valid during the call only."""


class Transport(ABC):
    """One program's connection to the broker: a control link, and a bulk link that exists while blobs are transferred.

    All methods may be called from any thread and never block on the network. `sent_bytes` and
    `received_bytes` count payloads since construction. `connection` is the number of the newest connection or attempt,
    from 1; 0 before the first. `shared_epoch` is the epoch of several coordinators in one process which share a link: a
    device joins all of them at once; 0: the coordinator has its own link. `announced_packet_bytes` is the size of the
    largest packet that the broker has announced to take, None if it has not. `broker_certificate` is that of the newest
    connection, DER; None without TLS.
    """

    offers_refused: ClassVar[bool] = False
    """True if a device that a coordinator refuses finally is offered to another one on this link."""

    def __init__(self, inbox: SimpleQueue[object]) -> None:
        self.inbox = inbox
        self.sent_bytes = 0
        self.received_bytes = 0
        self._count_lock = threading.Lock()
        self.connection = 0
        self.shared_epoch = 0
        self.announced_packet_bytes: int | None = None
        self.broker_certificate: bytes | None = None
        self.admits: Callable[[str, bytes], bool] = lambda topic, payload: True
        """Returns True if a message from this topic may enter the inbox; called in the network's thread."""

    @property
    def limits(self) -> BrokerLimits:
        """The broker's limits for a connection, as far as they are known."""
        return BrokerLimits()

    def use_limits(self, limits: BrokerLimits) -> None:  # noqa: B027 - a transport without a network has none
        """Keep these limits of the broker from now on."""

    @abstractmethod
    def open(self, will: Will | WillMaker | None = None) -> None:
        """Start to connect; Connected arrives in the inbox whenever the link comes up."""

    def begin_connection(self, will: Will | WillMaker | None) -> Will | None:
        """To be called before each attempt to connect; returns its will."""
        self.connection += 1
        return will(self.connection) if callable(will) else will

    def count_sent(self, size: int) -> None:
        with self._count_lock:
            self.sent_bytes += size

    def count_received(self, size: int) -> None:
        with self._count_lock:
            self.received_bytes += size

    @abstractmethod
    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Subscribe to a topic filter, also after reconnecting."""

    @abstractmethod
    def unsubscribe(self, topic_filter: str) -> None: ...

    @abstractmethod
    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        """Send a message. False while the link is down: the message is dropped."""

    @abstractmethod
    def listen(self, topic: str, sink: BulkSink) -> None:
        """Receive the bulk messages of one topic, also after reconnecting.

        They go to the sink, or into the inbox as Received, which the program passes on.
        """

    @abstractmethod
    def stop_listening(self, topic: str) -> None: ...

    @abstractmethod
    def bulk_up(self) -> bool:
        """Return whether bulk can be sent now. If not, open the bulk link; Wake arrives when it is up."""

    @abstractmethod
    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        """Send messages of head and body, QoS 0; a body must not change before it is sent.

        False while the bulk link is down: the messages are dropped.
        """

    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes in this process that are not sent yet; bulk senders wait while it is high."""

    def spread_return(self, seconds: float) -> None:  # noqa: B027 - a transport without a network never reconnects
        """After the loss of the link, reconnect at a random time within this interval."""

    def reconnect(self, reason: str) -> None:  # noqa: B027 - a transport without a network has one link
        """End the link, if it is up, and connect again, with the certificates that are there by then."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect for good, without the last will."""
