"""MQTT with paho, for any broker: version 5, or 3.1.1 if the broker does not support it.

Nothing depends on version 5, which reports limits in advance and reasons of refusals; ids, deadlines and
acknowledgements are in fedvit's own messages. Chunks go through `bulk`. Connections are made by `mqtt_connector`.
"""

import time
from collections.abc import Sequence
from queue import SimpleQueue

from paho.mqtt.client import Client
from paho.mqtt.enums import MQTTProtocolVersion

from fedvit.errors import BadPayload
from fedvit.transport.address import Address
from fedvit.transport.backoff import Backoff
from fedvit.transport.base import BulkSink, Transport, Wake, Will, WillMaker
from fedvit.transport.bulk import BulkLink
from fedvit.transport.mqtt_connector import MqttConnector
from fedvit.transport.mqtt_loop import MqttLoop
from fedvit.wire.limits import BrokerLimits

BOTH_VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
_HEADER_BYTES = 9  # at most: fixed header 5, length of the topic 2, packet id 2


class MqttTransport(Transport):
    """A link to an MQTT broker that reconnects by itself, for ever.

    After the loss of a link the first attempt is made within about `return_spread_s` seconds, which spreads the load of
    a large fleet. Its thread is that of `loop`, which is closed after it, or its own.

    Raises ConfigError when the address names certificates that cannot be read.
    """

    def __init__(
        self,
        inbox: SimpleQueue[object],
        address: Address,
        client_id: str,
        *,
        versions: Sequence[MQTTProtocolVersion] = BOTH_VERSIONS,
        return_spread_s: float = 0.0,
        loop: MqttLoop | None = None,
    ) -> None:
        super().__init__(inbox)
        self.address = address
        self._connector = connector = MqttConnector(self, address, client_id, versions, return_spread_s)
        self._bulk = BulkLink(
            address,
            f"{client_id}.b",
            lambda: connector.tls_context() if address.tls else None,
            woken=lambda: inbox.put(Wake()),
            received=self.count_received,
            backoff=Backoff(return_spread_s),
        )
        self._has_own_loop = loop is None
        self._loop = loop or MqttLoop()

    @property
    def client(self) -> Client | None:
        """paho's client of the connection, or of the attempt to connect."""
        return self._connector.client

    def report_acknowledged(self) -> None:
        """Put each acknowledgement of the broker into the inbox from now on, as Acknowledged."""
        self._connector.reports_acknowledged = True

    def open(self, will: Will | WillMaker | None = None) -> None:
        self._connector.will = will
        self._loop.add(self._connector)

    @property
    def limits(self) -> BrokerLimits:
        return self._connector.limits

    def use_limits(self, limits: BrokerLimits) -> None:
        self._connector.limits = limits
        self._connector.pace.per_s = self._bulk.pace.per_s = limits.publishes_per_s
        if (link := self._connector.link) is not None:
            link.max_inflight = limits.max_inflight

    def spread_return(self, seconds: float) -> None:
        self._connector.backoff.spread_s = seconds

    def subscribe(self, topic_filter: str, qos: int) -> None:
        with self._connector.lock:
            self._connector.filters[topic_filter] = qos
            link = self._connector.link
            if link is None or not link.answered:
                return  # goes out with the others when the broker has answered
        link.client.subscribe(topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        with self._connector.lock:
            self._connector.filters.pop(topic_filter, None)
            link = self._connector.link
        if link is not None and link.answered:
            link.client.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1) -> bool:
        self._check_size(topic, len(payload))
        link = self._connector.link
        is_open = link is not None and link.up and self._connector.closed_at is None
        if link is None or not is_open or not link.publish(topic, payload, qos):
            return False
        if link.waits:
            self._loop.look_after(self._connector)
        self.count_sent(len(payload))
        return True

    def listen(self, topic: str, sink: BulkSink) -> None:
        self._bulk.listen(topic, sink)

    def stop_listening(self, topic: str) -> None:
        self._bulk.stop_listening(topic)

    def bulk_up(self) -> bool:
        return self._bulk.up()

    def send_bulk(self, topic: str, messages: Sequence[tuple[bytes, memoryview]]) -> bool:
        sizes = [len(head) + len(body) for head, body in messages]
        self._check_size(topic, max(sizes, default=0))
        if not self._bulk.send(topic, messages):
            return False
        self.count_sent(sum(sizes))
        return True

    def pending_bytes(self) -> int:
        link = self._connector.link
        return self._bulk.pending_bytes() + (0 if link is None else link.pending_bytes())

    def _check_size(self, topic: str, size: int) -> None:
        """Raises BadPayload for a message over a limit: paho would send it again for ever."""
        most = self._connector.max_packet_bytes
        if size + len(topic.encode()) + _HEADER_BYTES > most:
            raise BadPayload(
                "FV1210", f"a message of {size} bytes on {topic} exceeds the limit of {most} bytes per packet"
            )
        if size > self.limits.max_payload_bytes:
            raise BadPayload(
                "FV1211",
                f"a message of {size} bytes on {topic} exceeds max_payload_bytes = {self.limits.max_payload_bytes} "
                "of the broker",
            )

    def reconnect(self, reason: str) -> None:
        if self._connector.leave(reason):
            self._loop.look_after(self._connector)

    def close(self) -> None:
        if self._connector.closed_at is None:
            self._connector.closed_at = time.monotonic()
            self._bulk.close()
            self._loop.remove(self._connector)
            if self._has_own_loop:
                self._loop.close()
