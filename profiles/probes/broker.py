"""The way to the broker and back, over the connection settings that a device has anyway."""

import secrets
import time
from queue import Empty, SimpleQueue
from statistics import median
from typing import Self

from fedvit.errors import LinkDown
from fedvit.transport.base import Connected, Disconnected, Received
from fedvit.transport.mqtt import Address, MqttTransport

CONNECT_S = 10.0
ECHO_S = 5.0
ECHO_BYTES = 64
TRIES = 9


class Echo:
    """A connection that says something to itself: messages to `topic` come back by the broker."""

    def __init__(self, address: Address, client_id: str, topic: str) -> None:
        self._inbox: SimpleQueue[object] = SimpleQueue()
        self._topic = topic
        self._transport = MqttTransport(self._inbox, address, client_id)

    def __enter__(self) -> Self:
        """Connect and subscribe. Raises LinkDown, with the broker's reason, when that fails or takes too long."""
        self._transport.subscribe(self._topic, 1)
        self._transport.open()
        try:
            if not isinstance(self._next(time.monotonic() + CONNECT_S), Connected):
                raise LinkDown(f"{self._transport.address}: no answer within {CONNECT_S:.0f} s")
        except LinkDown:
            self._transport.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def seconds(self, size_bytes: int, timeout_s: float = ECHO_S) -> float | None:
        """How long a message of this size is on its way there and back; None when it does not come back in time.

        Raises LinkDown, with the reason, when the broker closes the connection instead.
        """
        payload = secrets.token_bytes(16) + bytes(size_bytes - 16)
        began = time.monotonic()
        until = began + timeout_s
        if not self._transport.publish(self._topic, payload, qos=1):
            raise LinkDown(f"{self._transport.address}: the connection was lost")
        while (event := self._next(until)) is not None:
            if isinstance(event, Received) and event.payload == payload:
                return time.monotonic() - began
        return None

    def _next(self, until: float) -> object | None:
        try:
            event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return None
        if isinstance(event, Disconnected):
            raise LinkDown(event.reason)
        return event


def measure_round_trip(address: Address, client_id: str, topic: str, tries: int = TRIES) -> float:
    """The median time of small messages to the broker and back, in seconds; QoS 1 both ways.

    Raises LinkDown, with the reason, when there is no broker or it does not bring them back.
    """
    with Echo(address, client_id, topic) as echo:
        taken = []
        for _ in range(tries):
            if (seconds := echo.seconds(ECHO_BYTES)) is None:
                raise LinkDown(f"{address}: connected, but a message on {topic} did not come back in {ECHO_S:.0f} s")
            taken.append(seconds)
        return median(taken)
