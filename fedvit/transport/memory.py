"""A broker inside the process: rounds without a network, in tests and simulations.

It has the properties of a real broker that programs rely on (order within a topic, last wills, take-over
of a client id), and it can simulate faults: stop, lose a client without a disconnect, drop a share of the
QoS 0 messages.
"""

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from paho.mqtt.matcher import MQTTMatcher

from fedvit.errors import BadPayload
from fedvit.transport.base import BulkReceived, BulkSink, Connected, Disconnected, Received, Transport, Will, WillMaker


class MemoryBroker:
    """Routes between the transports of one process; safe from any thread.

    `loss` is the share of QoS 0 deliveries that are dropped, drawn from `seed`.
    """

    def __init__(self, *, loss: float = 0.0, seed: int = 0, max_packet_bytes: int = 1024 * 1024) -> None:
        self.max_packet_bytes = max_packet_bytes
        self._loss = loss
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._clients: dict[str, MemoryTransport] = {}
        # by filter: its clients, and the QoS that each was granted
        self._subscribers: Any = MQTTMatcher()  # type: ignore[no-untyped-call]
        self._running = True

    def stop(self) -> None:
        """Stop like a killed broker: every link is lost, no will is published."""
        with self._lock:
            self._running = False
            for client in self._clients.values():
                client.link_changed(Disconnected("memory: the broker stopped"))

    def start(self) -> None:
        """Start again; transports that are not closed are connected again."""
        with self._lock:
            self._running = True
            for client in self._clients.values():
                self._connect(client)

    def attach(self, client: "MemoryTransport") -> None:
        with self._lock:
            previous = self._clients.get(client.client_id)
            if previous is not None and previous is not client:
                self.detach(previous, with_will=True)
                previous.link_changed(Disconnected(f"memory: client id {client.client_id} connected elsewhere"))
            self._clients[client.client_id] = client
            if self._running:
                self._connect(client)
            else:
                client.link_changed(Disconnected("memory: connection refused"))

    def _connect(self, client: "MemoryTransport") -> None:
        client.link_changed(Connected())

    def detach(self, client: "MemoryTransport", *, with_will: bool) -> None:
        with self._lock:
            if self._clients.get(client.client_id) is not client:
                return
            del self._clients[client.client_id]
            if with_will and client.will is not None and self._running:
                self.route(client.will.topic, client.will.payload, qos=1)

    def route(self, topic: str, payload: bytes, *, qos: int) -> bool:
        """Deliver to all subscribers of `topic`; False while the broker is stopped."""
        with self._lock:
            if not self._running:
                return False
            granted: dict[MemoryTransport, int] = {}
            for subscribers in self._subscribers.iter_match(topic):
                for client, its in subscribers.items():
                    granted[client] = max(its, granted.get(client, 0))
            for client, its in granted.items():
                is_here = self._clients.get(client.client_id) is client
                if is_here and not (min(qos, its) == 0 and self._random.random() < self._loss):
                    client.deliver(topic, payload)
            return True

    def subscribe(self, client: "MemoryTransport", topic_filter: str, qos: int) -> None:
        with self._lock:
            try:
                self._subscribers[topic_filter][client] = qos
            except KeyError:
                self._subscribers[topic_filter] = WeakKeyDictionary({client: qos})

    def unsubscribe(self, client: "MemoryTransport", topic_filter: str) -> None:
        with self._lock, suppress(KeyError):
            self._subscribers[topic_filter].pop(client, None)
            if not self._subscribers[topic_filter]:
                del self._subscribers[topic_filter]


class MemoryTransport(Transport):
    """One client of a MemoryBroker."""

    def __init__(self, inbox: SimpleQueue[object], broker: MemoryBroker, client_id: str) -> None:
        super().__init__(inbox)
        self.client_id = client_id
        self.will: Will | None = None  # of the newest connection
        self._will: Will | WillMaker | None = None
        self._broker = broker
        self._bulk_topics: set[str] = set()
        self._up = False

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._will = will
        self._broker.attach(self)

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self._broker.subscribe(self, topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        self._broker.unsubscribe(self, topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        if len(topic) + len(payload) > self._broker.max_packet_bytes:
            raise BadPayload(
                "FV1210",
                f"a message of {len(payload)} bytes on {topic} exceeds the limit of "
                f"{self._broker.max_packet_bytes} bytes per packet",
            )
        if not self._up or not self._broker.route(topic, payload, qos=qos):
            return False
        self.count_sent(len(payload))
        return True

    def listen(self, topic: str, sink: BulkSink) -> None:
        """Chunks go into the inbox: calling the sink here would run one program's code in another's thread."""
        self._bulk_topics.add(topic)
        self.subscribe(topic, 0)
        sink.listening(topic)

    def stop_listening(self, topic: str) -> None:
        self.unsubscribe(topic)
        self._bulk_topics.discard(topic)

    def bulk_up(self) -> bool:
        return self._up

    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        return all(self.publish(topic, head + body, qos=0) for head, body in messages)

    def pending_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._up = False
        self._broker.detach(self, with_will=False)

    def vanish(self) -> None:
        """Disappear like a device without power: the will is published. `open` connects again."""
        self._up = False
        self._broker.detach(self, with_will=True)

    # --- called by the broker, which holds its lock ----------------------------------------------------

    def link_changed(self, event: Connected | Disconnected) -> None:
        self._up = isinstance(event, Connected)
        if self._up:
            self.will = self.begin_connection(self._will)
        self.inbox.put(event)

    def deliver(self, topic: str, payload: bytes) -> None:
        self.count_received(len(payload))
        if topic in self._bulk_topics:
            self.inbox.put(BulkReceived(topic, payload))
        elif self.admits(topic, payload):
            self.inbox.put(Received(topic, payload))
