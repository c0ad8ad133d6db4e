"""A connection to an MQTT broker: its client of paho, its state, and the messages that wait for the broker's limits."""

import threading
import time
from collections import deque

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessageInfo
from paho.mqtt.enums import MQTTProtocolVersion

from fedvit.transport.base import Received
from fedvit.transport.pace import Pace


class MqttLink:
    """A connection. `MqttTransport` makes a new one after each loss."""

    def __init__(self, client: Client, version: MQTTProtocolVersion, pace: Pace, max_inflight: int) -> None:
        self.client = client
        self.max_inflight = max_inflight
        self._pace = pace
        self.version = version
        self.began_at = time.monotonic()
        self.connected = False  # a socket to the broker is open
        self.unknown_version = False  # the broker does not support the tried version
        self.refused = False  # for another reason
        self.is_deaf = False  # the broker refused a subscription, as some do while their cluster elects a leader
        self.is_left = False  # this side connects again
        self.answered = False  # the broker accepted the connection: subscriptions may be sent
        self.up = False  # and they are in place: messages may be sent
        self.awaited: set[int] = set()  # subscriptions that the broker has not confirmed
        self.early: list[Received] = []  # brokers send retained messages before they confirm
        self.ended: str | None = None
        self._lock = threading.Lock()
        # by QoS, as the broker acknowledges QoS 1 later than QoS 0 leaves this process
        self._handed_over: tuple[deque[tuple[MQTTMessageInfo, int]], ...] = (deque(), deque())
        self._pending_bytes = 0
        self._waiting: deque[tuple[str, bytes, int]] = deque()  # until the broker's limit permits more

    def publish(self, topic: str, payload: bytes, qos: int) -> bool:
        """Publish, now or as soon as the broker's limits permit; False if the link is down."""
        with self._lock:
            if self._waiting or not self._may_publish(qos):
                self._waiting.append((topic, payload, qos))
                self._pending_bytes += len(payload)
                return True
            return self._hand_over(topic, payload, qos)

    def _hand_over(self, topic: str, payload: bytes, qos: int) -> bool:
        info = self.client.publish(topic, payload, qos)
        if info.rc != MQTT_ERR_SUCCESS:
            return False
        self._handed_over[qos].append((info, len(payload)))
        self._pending_bytes += len(payload)
        self._settle()
        return True

    def _may_publish(self, qos: int) -> bool:
        if qos:
            self._settle()
        return not (qos and len(self._handed_over[1]) >= self.max_inflight) and self._pace.take()

    def publish_due(self) -> float | None:
        """Publish what waits, as far as the limits permit. Seconds until more may be published; None if nothing waits,
        or only for an acknowledgement."""
        with self._lock:
            while self._waiting and self._may_publish(self._waiting[0][2]):
                topic, payload, qos = self._waiting.popleft()
                self._pending_bytes -= len(payload)
                self._hand_over(topic, payload, qos)
            return (self._pace.wait_s() or None) if self._waiting else None

    @property
    def waits(self) -> bool:
        """True while messages wait until more may be published."""
        return bool(self._waiting)

    def pending_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._pending_bytes

    def count_unacknowledged(self) -> int:
        with self._lock:
            self._settle()
            return len(self._handed_over[1])

    def _settle(self) -> None:
        for waiting in self._handed_over:
            while waiting and waiting[0][0].is_published():
                self._pending_bytes -= waiting.popleft()[1]
