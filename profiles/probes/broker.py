"""Measures the round trip to the broker, with the device's own connection settings."""

import time
from queue import Empty, SimpleQueue
from statistics import median
from typing import Self

from fedvit.errors import LinkDown
from fedvit.transport.address import Address
from fedvit.transport.base import Acknowledged, Connected, Disconnected
from fedvit.transport.mqtt import MqttTransport

CONNECT_S = 10.0
ANSWER_S = 5.0
PROBE_BYTES = 64
TRIES = 9


class BrokerProbe:
    """A connection that publishes to `topic`, which has no subscribers, and waits for the broker's acknowledgements."""

    def __init__(self, address: Address, client_id: str, topic: str) -> None:
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._topic = topic
        self._transport = MqttTransport(self._inbox, address, client_id)
        self._transport.report_acknowledged()

    def __enter__(self) -> Self:
        """Connect. Raises LinkDown, with the broker's reason, when that fails or takes too long."""
        self._transport.open()
        try:
            if not isinstance(self._next(time.monotonic() + CONNECT_S), Connected):
                raise LinkDown("FV1209", f"{self._transport.address}: no answer within {CONNECT_S:.0f} s")
        except LinkDown:
            self._transport.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def seconds(self, size_bytes: int, timeout_s: float = ANSWER_S) -> float | None:
        """Measure the time until the broker acknowledges a message of this size; None if that takes too long.

        Raises LinkDown, with the reason, when the broker refuses the message (which only version 5 of MQTT can say) or
        closes the connection instead.
        """
        began = time.monotonic()
        until = began + timeout_s
        if not self._transport.publish(self._topic, bytes(size_bytes), qos=1):
            raise LinkDown("FV1209", f"{self._transport.address}: the connection was lost")
        while (event := self._next(until)) is not None:
            if isinstance(event, Acknowledged):
                if event.refusal:
                    raise LinkDown(
                        "FV1209", f"{self._transport.address}: a message on {self._topic} is refused: {event.refusal}"
                    )
                return time.monotonic() - began
        return None

    def _next(self, until: float) -> object | None:
        try:
            event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return None
        if isinstance(event, Disconnected):
            raise LinkDown("FV1209", event.reason)
        return event


def measure_round_trip(address: Address, client_id: str, topic: str, tries: int = TRIES) -> float:
    """The median time of small messages to the broker, and of its acknowledgements back, in seconds; QoS 1.

    Raises LinkDown, with the reason, without a broker or if it refuses them.
    """
    with BrokerProbe(address, client_id, topic) as probe:
        taken = []
        for _ in range(tries):
            if (seconds := probe.seconds(PROBE_BYTES)) is None:
                raise LinkDown(
                    "FV1209", f"{address}: connected, but no answer to a message on {topic} in {ANSWER_S:.0f} s"
                )
            taken.append(seconds)
        return median(taken)
