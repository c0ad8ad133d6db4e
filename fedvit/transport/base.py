"""The transport: publish and subscribe, events into one inbox. Nothing is promised beyond "usually arrives".

Every program has one thread that reads the inbox; whatever arrives, from the network or from its own
worker threads, becomes an event there. So no program state needs a lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol


class Received(NamedTuple):
    topic: str
    payload: bytes


class Connected(NamedTuple):
    """The link is up; subscriptions are in place again."""


class Disconnected(NamedTuple):
    """The link is down; the transport goes on trying by itself."""

    reason: str


class Taken(NamedTuple):
    """The broker acknowledged a message of QoS 1; `refusal` is why it did not take it, where it says so."""

    refusal: str | None


class Wake(NamedTuple):
    """Nothing arrived, but something can go on: the loop comes round to it."""


class Will(NamedTuple):
    """What the broker publishes when this side vanishes without a farewell."""

    topic: str
    payload: bytes


WillMaker = Callable[[int], Will]
"""Makes the will of one connection from the connection's number."""


class BulkSink(Protocol):
    """Who takes bulk messages. Both methods may be called from any thread."""

    def listening(self, topic: str) -> None:
        """From now on messages on `topic` arrive. Said again when the link was lost: what was under way is gone."""

    def heard(self, topic: str, message: bytes | memoryview) -> None:
        """A message came; a memoryview is valid during the call only."""


class Transport(ABC):
    """One program's way to the broker: one link for control, and one for bulk that exists while bulk moves.

    All methods may be called from any thread and never block on the network. `sent_bytes` and
    `received_bytes` count payloads since construction. `connection` is the number of the newest connection, or attempt
    at one: 0 before the first, and one more with each. `shared_epoch` is that of several coordinators of one process
    which share a link: a device joins all of them at once; 0: the coordinator has one of its own.
    """

    def __init__(self, inbox: SimpleQueue[object]) -> None:
        self.inbox = inbox
        self.sent_bytes = 0
        self.received_bytes = 0
        self.connection = 0
        self.shared_epoch = 0

    @abstractmethod
    def open(self, will: Will | WillMaker | None = None) -> None:
        """Begin to connect; Connected arrives in the inbox each time the link comes up."""

    def _begin_connection(self, will: Will | WillMaker | None) -> Will | None:
        """To be called before each attempt to connect: its will."""
        self.connection += 1
        return will(self.connection) if callable(will) else will

    @abstractmethod
    def subscribe(self, topic_filter: str, qos: int) -> None:
        """Hear a topic filter from now on, also after reconnecting."""

    @abstractmethod
    def unsubscribe(self, topic_filter: str) -> None: ...

    @abstractmethod
    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        """Hand a message over. False while the link is down: then nothing was queued."""

    @abstractmethod
    def listen(self, topic: str, sink: BulkSink) -> None:
        """Hear the bulk messages on one topic, also after reconnecting.

        They go to the sink, or into the inbox as Received, for the program to pass on.
        """

    @abstractmethod
    def stop_listening(self, topic: str) -> None: ...

    @abstractmethod
    def bulk_up(self) -> bool:
        """Whether bulk can be sent now; if not, the link for it is brought up, and Wake comes then."""

    @abstractmethod
    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        """Hand over messages of head and body, QoS 0; a body must not change before it has left.

        False while the bulk link is down: then nothing was queued.
        """

    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes handed over that have not left this process yet; bulk senders wait while it is high."""

    @abstractmethod
    def close(self) -> None:
        """Leave for good, without the last will."""
